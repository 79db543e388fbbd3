"""What is checked, the process that checks it, and what ranks make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_kernels.checks import Checked
from tests.support.vllm_configs import replan, vllm_config
from vllm_diffusion.kernel_choice import on_ranks, process
from vllm_diffusion.kernel_choice.cases import TILE, KernelCase, Served, attention_order, few_tiles
from vllm_diffusion.kernel_choice.child import outcome_of
from vllm_diffusion.kernel_choice.process import CannotCheckError, CheckProcess
from vllm_diffusion.kernel_choice.self_check import NothingRightError
from vllm_diffusion.sampling.vocabulary_stream import TILE_ON_GPU
from vllm_diffusion.startup.kernel_choices import KernelChoices, LayerKind

KIND = LayerKind(2, 1, 32, -1, "auto")
SERVED = Served((KIND,), 8, 300, 16, None, "float32", max_model_len=40)


def test_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers real cases one after another, here those of PyTorch on a CPU."""
    # Machines that run tests are busy.
    monkeypatch.setattr(process, "START_SECONDS", 200.0)
    monkeypatch.setattr(process, "CASE_SECONDS", 100.0)
    with CheckProcess("cpu", seconds=300, measures=True) as running:
        for kernel in ("device", "noise"):
            outcome = running.check(KernelCase(kernel, "", "PyTorch"))
            assert (outcome.state, outcome.difference) == ("right", 0.0)
            assert outcome.microseconds > 0


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_SECONDS", 200.0)
    with (
        CheckProcess("nonsense:0", seconds=300) as running,
        pytest.raises(CannotCheckError, match="nonsense"),
    ):
        running.check(KernelCase("device", "", "PyTorch"))


def raising(error: Exception) -> dict[str, object]:
    def check() -> Checked:
        raise error

    return outcome_of(check, False)


@pytest.mark.parametrize(
    ("error", "state", "goes_on"),
    [
        (AssertionError("attention: error 3 exceeds 1\nsecond line"), "wrong", True),
        (NotImplementedError("needs a GPU of compute capability 9.x"), "refused", True),
        (ValueError("takes head_dim 256"), "refused", True),
        (AttributeError("a mistake of the check's own"), "unknown", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "wrong", False),
        (torch.OutOfMemoryError("CUDA out of memory"), "unknown", False),
    ],
)
def test_outcomes(error: Exception, state: str, goes_on: bool) -> None:
    """A process whose context may be broken ends; memory that is gone is no kernel's fault."""
    found = raising(error)
    assert found["state"] == state
    assert found.get("goes_on", False) == goes_on
    assert "\n" not in str(found["why"])


def test_kernels_that_are_served() -> None:
    served = replace(SERVED, spans=(0, 8))
    names = [case.name for role in served.roles() for case in role.cases()]
    attention = f"attention of {KIND.name}"
    assert names == [
        "device, PyTorch",
        "noise, PyTorch",
        *(f"{attention}, {impl}" for impl in ("triton", "cute", "reference")),
        *("statistics, triton", "statistics, reference"),
        *("kept rows, triton", "kept rows, reference"),
    ]
    role = next(role for role in served.roles() if role.kernel == "attention")
    by_triton, by_cute, _ = role.cases()
    # With and without spans: a prompt's end with its canvas, a whole prompt, and canvases alone; no context
    # beyond the longest.
    assert {(shape.span, shape.rows[0]) for shape in by_triton.shapes} == {
        (span, rows) for span in (0, 8) for rows in ((16, 8), (13, 13), (8, 0))
    }
    assert {shape.context for shape in by_triton.shapes} == {24}
    # FlashAttention-4 has no spans, which are Triton's then; and what it refuses is Triton's too.
    assert {shape.span for shape in by_cute.shapes} == {0}
    assert role.ways["cute"] == ((by_triton,), (by_cute, by_triton))


@pytest.mark.parametrize(
    ("chosen", "order"),
    [
        ("auto", ("triton", "cute", "reference")),
        ("cute", ("cute", "triton", "reference")),
        ("triton", ("triton", "cute", "reference")),
        ("reference", ("reference",)),
    ],
)
def test_order(chosen: str, order: tuple[str, ...]) -> None:
    assert attention_order(chosen) == order


def test_a_key_changes_with_the_inputs() -> None:
    cases = [
        next(
            case
            for role in replace(SERVED, max_model_len=length).roles()
            for case in role.cases()
            if case.kernel == "attention"
        )
        for length in (40, 400)
    ]
    assert cases[0].name == cases[1].name
    assert cases[0].key != cases[1].key


@pytest.mark.parametrize(
    ("num_ids", "few"),
    [(300, 300), (20000, 20000), (24576, 24576), (262144, 24576), (157184, 17920)],
)
def test_few_tiles(num_ids: int, few: int) -> None:
    """The last tile is as odd as the sampler's, which decides what Triton compiles."""
    assert few_tiles(num_ids) == few
    assert (num_ids - few) % TILE == 0
    assert TILE_ON_GPU % TILE == 0
    assert TILE % 16 == 0


GPUS = ["H200", "H200", "L4", "L4"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server's configuration on two kinds of GPU."""
    config = vllm_config(additional_config={"diffusion": {"self_check": "auto"}})
    monkeypatch.setattr(on_ranks, "gpu_name", lambda device: GPUS[device])
    platform = SimpleNamespace(
        is_cuda=lambda: True, logical_device_id_to_visible_device_id=lambda device: device
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(on_ranks.Served, "of", lambda config, choices: None)
    return config


def test_a_refusal_is_left_for_the_command(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It started this process, and learns no more than that it has ended."""

    def check(*_: object, **__: object) -> None:
        raise NothingRightError("nothing is right")

    monkeypatch.setattr(on_ranks, "checked_choices", check)
    replan(ranks, refusal_path=tmp_path / "folder" / "refusal")
    with pytest.raises(NothingRightError):
        on_ranks.decide(ranks, 0)
    assert (tmp_path / "folder" / "refusal").read_text() == "nothing is right"


def test_the_first_rank_of_a_kind_decides(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others check nothing, and take what the first found."""
    found = {
        "H200": KernelChoices(statistics="reference"),
        "L4": KernelChoices(kept_rows="reference"),
    }
    checked: list[str] = []

    def check(served: None, *, device: str, gpu: str, **_: object) -> KernelChoices:
        checked.append(device)
        return found[gpu]

    monkeypatch.setattr(on_ranks, "checked_choices", check)
    own = [on_ranks.decide(ranks, rank) for rank in range(4)]
    assert checked == ["cuda:0", "cuda:2"]

    def gather(told: list[object], mine: object, group: object) -> None:
        told[:] = list(zip(GPUS, own, strict=True))

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    world = SimpleNamespace(world_size=4, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.get_world_group", lambda: world)
    agreed = [on_ranks.agree(ranks, rank, own[rank]) for rank in range(4)]
    assert agreed == [found[gpu] for gpu in GPUS]
