"""Formats that only a GPU supports are loaded, and an incomplete file is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.null_gpu.engine_cases import decide_outcomes, passes_of, runner_of, start
from tests.support.engines.loading import load, one_rank
from tests.support.families.cases import CASES
from tests.support.models.checkpoints import SHIPPED, changed
from tests.support.models.integer_formats import LAYOUTS, integer_checkpoint
from tests.support.null_gpu.processes import NullGpu

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SDAR = SHIPPED.parent / "tiny_sdar"
MADE = ("sdar-moe", "llada2.1", "llada", "nemotron")


def load_each(folders: list[str]) -> list[str]:
    """Return for each checkpoint the error that refused it, or nothing."""
    outcomes = []
    with one_rank():
        for folder in folders:
            try:
                load(Path(folder))
            except (AttributeError, NotImplementedError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            else:
                outcomes.append("")
    return outcomes


def serve_floats(model: str, scheme: str) -> dict[str, Any]:
    """Start an engine that quantizes weights while loading; return its kernels and passes."""
    from vllm_diffusion.weights.formats import describe_kernels

    decide_outcomes()
    llm = start(model, quantization=scheme, dtype="bfloat16", enforce_eager=True)
    kernels = describe_kernels(runner_of(llm).model)
    return {"kernels": kernels, "passes": passes_of(llm, "plain")["passes"]}


def source_of(name: str, folder: Path) -> Path:
    shipped = {"diffusion_gemma": SHIPPED, "sdar": SDAR}
    return shipped[name] if name in shipped else CASES[name].make().save(folder / name)


def loaded(null_gpu: NullGpu, folders: list[Path]) -> list[str]:
    outcomes = null_gpu.run(f"{__name__}:load_each", folders=[*map(str, folders)])
    return list(outcomes.checked())


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("diffusion_gemma", ["W4A16", "auto-round"]),
        # vLLM takes GPTQ's layers without a v_proj for torn ones, in stock too.
        pytest.param(
            "diffusion_gemma",
            [one for one in LAYOUTS if one != "gptq"],
            marks=pytest.mark.slow,
        ),
        *(pytest.param(name, LAYOUTS, marks=pytest.mark.slow) for name in ("sdar", *MADE)),
    ],
)
def test_every_layout(name: str, layouts: list[str], null_gpu: NullGpu, tmp_path: Path) -> None:
    """Every layout of packed, repacked and bias-free weights is loaded."""
    source = source_of(name, tmp_path)
    folders = [integer_checkpoint(source, tmp_path / one, one) for one in layouts]
    assert dict(zip(layouts, loaded(null_gpu, folders), strict=True)) == dict.fromkeys(layouts, "")


def test_lacking_tensors(null_gpu: NullGpu, tmp_path: Path) -> None:
    """A packed layer or expert that lacks any of its tensors is refused."""
    layer = "model.decoder.layers.0"
    damaged = {
        f"{layer}.self_attn.q_proj.weight_packed": None,
        f"{layer}.experts.1.up_proj.weight_scale": None,
        f"{layer}.experts.1.down_proj.weight_packed": slice(0, 64),
    }
    whole = integer_checkpoint(SHIPPED, tmp_path / "whole", "W4A16")

    def damage(tensors: dict[str, Tensor], name: str, rows: slice | None) -> None:
        tensor = tensors.pop(name)
        if rows is not None:
            tensors[name] = tensor[rows].contiguous()

    folders = [
        changed(whole, tmp_path / str(i), partial(damage, name=name, rows=rows))
        for i, (name, rows) in enumerate(damaged.items())
    ]
    for name, outcome in zip(damaged, loaded(null_gpu, folders), strict=True):
        assert outcome.startswith(f"ValueError: {name} "), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "num_linears"),
    [
        ("diffusion_gemma", "model.decoder.layers", 16),
        ("sdar", "model.layers", 16),
        ("mineru", "language_model.model.layers", 12),
    ],
)
def test_floats_that_are_quantised_while_they_are_loaded(
    name: str, layers: str, num_linears: int, null_gpu: NullGpu, tmp_path: Path
) -> None:
    """An engine that quantizes floats while loading answers, and refuses an incomplete file."""
    source = source_of(name, tmp_path)
    case, scheme = f"{__name__}:serve_floats", "fp8_per_tensor"
    served = null_gpu.run(case, model=str(source), scheme=scheme).checked()
    assert served["passes"]
    assert f"{num_linears} x linear: CutlassFP8ScaledMMLinearKernel" in served["kernels"]
    assert ("4 x experts" in served["kernels"]) == (name == "diffusion_gemma")
    lacking = f"{layers}.0.self_attn.q_proj.weight"
    lacks = changed(source, tmp_path / "lacks", lambda tensors: tensors.pop(lacking))
    refused = null_gpu.run(case, model=str(lacks), scheme=scheme)
    assert f"{lacking} should be in" in str(refused.error)
