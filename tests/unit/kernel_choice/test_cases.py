"""What is checked, the process that checks it, and what ranks make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from attention_kernels.checks import AttentionShape, Checked
from tests.support.graphs import emulated_capture
from vllm_diffusion.attention.cache_writes import WRITERS, write_in_pytorch
from vllm_diffusion.kernel_choice import graphs, on_ranks, process
from vllm_diffusion.kernel_choice.cache_writes import check_cache_write
from vllm_diffusion.kernel_choice.cases import TILE, KernelCase, Served, attention_order, few_tiles
from vllm_diffusion.kernel_choice.child import outcome_of
from vllm_diffusion.kernel_choice.process import CannotCheckError, CheckProcess
from vllm_diffusion.kernel_choice.self_check import NothingRightError
from vllm_diffusion.kernel_choice.step_shape import StepShape, free_canvas
from vllm_diffusion.sampling.vocabulary_stream import TILE_ON_GPU
from vllm_diffusion.startup.kernel_choices import KernelChoices, LayerKind

CPU = torch.device("cpu")
KIND = LayerKind(2, 1, 32, -1, "auto")
LAYER = AttentionShape(2, 1, 32, -1, ((8, 0),), 20, dtype="float32")
STEP = StepShape(free_canvas(8), vocab=300, hidden=16, slots=4, dtype="float32")


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
    served = Served((KIND,), STEP, max_model_len=40, spans=(0, 8))
    names = [case.name for role in served.roles() for case in role.cases]
    assert names == [
        "device, PyTorch",
        "noise, PyTorch",
        *(f"attention of {KIND.name}, denoise, {impl}" for impl in ("triton", "cute", "reference")),
        *(f"attention of {KIND.name}, mixed, {impl}" for impl in ("triton", "cute", "reference")),
        *("statistics, triton", "statistics, reference"),
        *("kept rows, triton", "kept rows, reference"),
        *(f"cache writes, {impl}" for impl in ("triton", "compiled", "reference")),
    ]
    mixed = next(role for role in served.roles() if role.phase == "mixed").cases[0]
    # With and without spans, a prompt's end with its canvas and a whole prompt; no context beyond the longest.
    assert {(shape.span, shape.rows[0]) for shape in mixed.shapes} == {
        (span, rows) for span in (0, 8) for rows in ((16, 8), (13, 13))
    }
    assert {shape.context for shape in mixed.shapes} == {24}
    assert [role.cases[0].kernel for role in served.graph_roles()] == [
        "step graph",
        "attention graph",
    ]
    eager = Served((KIND,), STEP, max_model_len=40, uses_graphs=False)
    assert not list(eager.graph_roles())


@pytest.mark.parametrize(
    ("chosen", "order"),
    [
        ("auto", ("triton", "cute", "reference")),
        ("cute", ("cute", "triton", "reference")),
        ("reference", ("reference",)),
    ],
)
def test_order(chosen: str, order: tuple[str, ...]) -> None:
    assert attention_order(chosen) == order


def test_a_key_changes_with_the_inputs() -> None:
    cases = [
        next(role for role in Served((KIND,), STEP, length).roles() if role.kind).cases[0]
        for length in (40, 400)
    ]
    assert cases[0].name == cases[1].name
    assert cases[0].key != cases[1].key


def other_bits(function, inputs):
    """A capture whose replays write something else."""
    replay = emulated_capture(function, inputs)

    def spoilt():
        output = replay()
        tensors = (
            [output] if isinstance(output, torch.Tensor) else [x for x in output if x is not None]
        )
        for tensor in tensors:
            tensor.copy_(tensor + 1 if tensor.dtype != torch.bool else ~tensor)
        return output

    return spoilt


def test_graphs() -> None:
    """A step and attention, replayed: the same bits, or an error that names what differs."""
    assert graphs.check_step_graph(STEP, CPU, emulated_capture).difference == 0
    with pytest.raises(AssertionError, match="of step 0"):
        graphs.check_step_graph(STEP, CPU, other_bits)
    role = list(Served((KIND,), STEP, max_model_len=40).graph_roles())[-1]
    (shape,) = role.cases[0].shapes
    assert graphs.check_attention_graph(shape, "triton", CPU, emulated_capture).difference == 0
    with pytest.raises(AssertionError, match="differs in attention"):
        graphs.check_attention_graph(shape, "triton", CPU, other_bits)


@pytest.mark.parametrize(
    ("impl", "is_fp8"), [("triton", False), ("reference", False), ("reference", True)]
)
def test_cache_writes(impl: str, is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM's own kernel, on Triton's interpreter, which loses the carry when it rounds 7.8 to FP8."""
    monkeypatch.setattr(current_platform, "has_device_capability", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    shape = replace(LAYER, is_fp8=is_fp8)
    assert check_cache_write(shape, impl, CPU).difference == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key, value, slots: (key + 1e-3, value, slots),
        lambda key, value, slots: (key, torch.full_like(value, torch.nan), slots),
        lambda key, value, slots: (value, key, slots),
        lambda key, value, slots: (key, value, slots.clamp(min=0)),
        lambda key, value, slots: (key, value, (slots + 1) % 128),
    ],
    ids=["another value", "not a number", "keys for values", "padding", "another slot"],
)
def test_wrong_cache_writes(
    spoil: Callable[..., tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(
        key: torch.Tensor, value: torch.Tensor, keys: Any, values: Any, slots: Any, *rest: Any
    ) -> None:
        key, value, slots = spoil(key, value, slots)
        write_in_pytorch(key, value, keys, values, slots, *rest)

    monkeypatch.setitem(WRITERS, "compiled", wrong)
    with pytest.raises(AssertionError, match="the cache is off by"):
        check_cache_write(LAYER, "compiled", CPU)


def test_cache_writes_of_a_gpu_without_fp8_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused there, and no fault of the kernel's."""
    monkeypatch.setattr(current_platform, "has_device_capability", lambda *_: False)
    with pytest.raises(NotImplementedError):
        check_cache_write(replace(LAYER, is_fp8=True), "triton", CPU)


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


def test_choices_as_json() -> None:
    choices = KernelChoices(
        attention={KIND.name: {"mixed": "cute"}}, cache_writes="compiled", kept_rows="reference"
    )
    assert KernelChoices.from_json(json.loads(json.dumps(choices.to_json()))) == choices
    assert choices.attention_of(KIND, "mixed") == "cute"
    assert choices.attention_of(KIND, "denoise") == "auto"
    for wrong in (
        {"speed": 3},
        {"statistics": "cute"},
        {"cache_writes": "cute"},
        {"attention": {KIND.name: {"mixed": "fast"}}},
        {"attention": {KIND.name: {"late": "triton"}}},
        {"two_streams": 1},
    ):
        with pytest.raises(ValueError, match="is not|must be"):
            KernelChoices.from_json(wrong)


GPUS = ["H200", "H200", "L4", "L4"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A server's configuration on two kinds of GPU."""
    monkeypatch.setattr(on_ranks, "gpu_name", lambda device: GPUS[device])
    platform = SimpleNamespace(
        is_cuda=lambda: True, logical_device_id_to_visible_device_id=lambda device: device
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(on_ranks, "kernel_choices", lambda config: KernelChoices())
    monkeypatch.setattr(
        on_ranks, "plugin_settings", lambda config: SimpleNamespace(self_check="auto", tuned=None)
    )
    monkeypatch.setattr(on_ranks.Served, "of", lambda config, choices: None)
    return SimpleNamespace(parallel_config=SimpleNamespace(get_local_gpu_index=lambda rank: rank))


def test_a_refusal_is_left_for_the_command(
    ranks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It started this process, and learns no more than that it has ended."""

    def check(*_: object, **__: object) -> None:
        raise NothingRightError("nothing is right")

    monkeypatch.setattr(on_ranks, "checked_choices", check)
    ranks.model_config = SimpleNamespace(refusal_path=tmp_path / "folder" / "refusal")
    with pytest.raises(NothingRightError):
        on_ranks.decide(ranks, 0)
    assert (tmp_path / "folder" / "refusal").read_text() == "nothing is right"


def test_the_first_rank_of_a_kind_decides(
    ranks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
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
