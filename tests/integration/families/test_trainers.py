"""Checkpoints and adapters by the names that trainers write: each is served, or refused with what
serves it.

Names were read in NeMo AutoModel 0.7.0 and Turbo-dLLM 0.1.6 (wheels) and ZHZisZZ/dllm at ca17675.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.families.test_a2d import serve_and_compare
from tests.support.engines.engine import TracedEngine
from tests.support.engines.loading import load, one_rank
from tests.support.engines.refused import refusal
from tests.support.engines.vllm_configs import configure
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES, Wanted
from tests.support.families.llada2_model import llada2
from tests.support.families.model import MASK_ID, TinyModel
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import SHIPPED, changed

pytestmark = pytest.mark.engine

# Turbo-dLLM's Fast-dLLM v2 leaves config.json as it was.
BODIES = {
    "qwen3": (tiny.fast_dllm_qwen3, "Fast_dLLM_Qwen3ForCausalLM"),
    "qwen2": (
        replace(
            tiny.fast_dllm,
            config=tiny.fast_dllm.config
            | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "auto_map": {}},
            block_length_key=None,
        ),
        "Fast_dLLM_QwenForCausalLM",
    ),
}


@pytest.mark.parametrize("block_length", [32, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_fast_dllm(name: str, block_length: int, tmp_path: Path) -> None:
    """A body that was trained as Fast-dLLM v2 is vLLM's own until an operator names it, and then
    has the loop's tokens.
    """
    make, architecture = BODIES[name]
    folder = make().save(tmp_path / "plain")
    assert getattr(configure(folder).model_config, "diffusion", None) is None
    overrides = {
        "architectures": [architecture],
        "bd_size": block_length,
        "mask_token_id": MASK_ID,
    }
    case = replace(
        CASES["fast-dllm"],
        make=partial(make, block_length=block_length),
        options={"hf_overrides": overrides},
    )
    wanted = [Wanted(max_tokens=n, threshold=t) for n, t in ((35, 0.3), (64, 0.1), (20, 0.9))]
    serve_and_compare(case, tmp_path / "served", wanted, is_asynchronous=False)


@pytest.mark.parametrize(
    ("place", "is_refused"),
    [
        ("Qwen3-0.6B/mdlm/alpaca/checkpoint-final", True),
        ("Qwen3-0.6B-diffusion-mdlm-v0.1", True),
        ("Qwen3-0.6B/bd3lm/alpaca/checkpoint-final", False),
        ("mdlm/bd3lm/checkpoint-final", False),
        ("bd3lm", False),
    ],
)
def test_places_of_dllm(place: str, is_refused: bool, tmp_path: Path) -> None:
    """dllm's MDLM, whose files are a BD3LM's, is known by the folder above the one that is served
    too.
    """
    folder = tiny.a2d().save(tmp_path / place)
    overrides = {"architectures": ["A2DQwen3MDLM"]}
    if is_refused:
        assert f"--hf-overrides '{json.dumps(overrides)}'" in refusal(folder)
        served = configure(folder, hf_overrides=overrides).model_config
        assert served.diffusion.spec.layout.recomputes
    else:
        assert configure(folder).model_config.is_diffusion


def nemo_adapter(model: TinyModel, folder: Path, ends: tuple[str, ...]) -> Path:
    """Write an adapter as NeMo AutoModel does, of every published module that its recipe's patterns
    match.
    """
    generator = torch.Generator().manual_seed(0)
    tensors, modules = {}, []
    for name, tensor in model.tensors().items():
        module, _, end = name.rpartition(".")
        if end == "weight" and tensor.ndim == 2 and module.endswith(ends):
            modules.append(module)
            for half, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                tensors[f"{module}.lora_{half}"] = torch.randn(shape, generator=generator)
    config: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "target_modules": modules,
        "base_model_name_or_path": "a/b",
    }
    return write_adapter(folder, tensors, config)


PROJECTIONS = (".q_proj", ".k_proj", ".v_proj")
LLADA = (*PROJECTIONS, ".attn_out", ".ff_proj", ".up_proj")


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        (tiny.llada, (*LLADA, ".ff_out")),
        (
            llada2,
            (
                *("attention.query_key_value", "attention.dense"),
                *(".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj"),
            ),
        ),
        (tiny.nemotron, (*PROJECTIONS, ".o_proj", ".gate_proj", ".up_proj", ".down_proj")),
    ],
    ids=["llada", "llada2", "nemotron"],
)
def test_adapters_of_nemo(make: Any, ends: tuple[str, ...], tmp_path: Path) -> None:
    """Adapters of its recipes fit; that of LLaDA matches the head too, and is refused until it is
    left out.
    """
    model = make()
    folder = nemo_adapter(model, tmp_path / "adapter", ends)
    served = configure(model.save(tmp_path / "model"), enable_lora=True)
    rules = served.model_config.diffusion.adapters
    if ".ff_out" in ends:
        with pytest.raises(ValueError, match="it adapts model.transformer.ff_out, but .* merge it"):
            rules.check(str(folder))
        in_layers = tuple(f".{i}.ff_out" for i in range(3))
        folder = nemo_adapter(model, tmp_path / "layers", (*LLADA, *in_layers))
    rules.check(str(folder))


def test_diffusion_gemma_of_nemo(tmp_path: Path) -> None:
    """A full DiffusionGemma has no encoder's scalars and no tower there, and factors of experts are
    in their matrices.
    """

    def as_nemo(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.encoder.")]:
            del tensors[name]
        for name in [n for n in tensors if n.endswith("router.per_expert_scale")]:
            scale = tensors[name]
            down = name.replace("router.per_expert_scale", "experts.down_proj")
            tensors[down] = tensors[down] * scale[:, None, None]
            tensors[name] = torch.ones_like(scale)

    folder = changed(SHIPPED, tmp_path / "nemo", as_nemo)
    assert answer_of(folder) == answer_of(SHIPPED)


def test_stacked_experts_of_dfactory(tmp_path: Path) -> None:
    """A LLaDA2 whose experts dFactory stacked for its trainer answers as one of single experts, and
    a stack that lacks an expert is named.
    """

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts.0." in n]:
            start, matrix = name.removesuffix(".weight").split(".experts.0.")
            numbers = range(sum(n.startswith(f"{start}.experts.") and matrix in n for n in tensors))
            single = [tensors.pop(f"{start}.experts.{i}.{matrix}.weight") for i in numbers]
            tensors[f"{start}.experts.{matrix}"] = torch.stack(single)

    single = llada2().save(tmp_path / "single")
    stacked = changed(single, tmp_path / "stacked", stack)
    assert answer_of(stacked) == answer_of(single)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in tensors if n.endswith(".experts.up_proj"))
        tensors[name] = tensors[name][:-1].clone()

    with one_rank(), pytest.raises(ValueError, match=r"experts.up_proj in .* lacks expert \d"):
        load(changed(stacked, tmp_path / "short", shorten))


def test_head_of_tied_embeddings(tmp_path: Path) -> None:
    """An A2D whose file has a head beside tied embeddings answers as one without it."""

    def tie(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    def with_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = tiny.a2d().save(tmp_path / "a2d")
    plain = changed(source, tmp_path / "plain", lambda t: t.pop("lm_head.weight", None), tie)
    assert answer_of(changed(plain, tmp_path / "head", with_head)) == answer_of(plain)


def answer_of(checkpoint: Path) -> list[int]:
    """Return the tokens of one answer."""
    with TracedEngine(checkpoint, max_model_len=256) as engine:
        (output,) = engine.generate([[2, 40, 41, 42, 43]], seeds=[1], max_tokens=32)
        return list(output.token_ids)
