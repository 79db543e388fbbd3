"""Small functions of a pass compile once for any number of rows, and equal eager execution, also
where a compiler cannot write its files.
"""

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.canvas.compiled import compiled, compiled_by_rows
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.families.diffusion_gemma.state import DiffusionGemmaModelState
from vllm_diffusion.sampling.pass_settings import PassSettings
from vllm_diffusion.sampling.sampling_functions import SamplingFunctions
from vllm_diffusion.startup.machine import has_cpp_compiler

pytestmark = pytest.mark.engine

SLOTS, CANVAS, VOCAB, HIDDEN = 5, 8, 50, 24
MOST_ROWS = 2 * SLOTS * CANVAS
CPU = torch.device("cpu")
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def rows_of_slots(num_canvases: int) -> tuple[Tensor, Tensor]:
    """Return slot and position of each row, last slots first; 0 canvases mean 3 narrow rows."""
    if num_canvases == 0:
        return torch.full((3,), 2), torch.arange(3)
    slots = torch.arange(SLOTS).flip(0)[:num_canvases]
    return slots.repeat_interleave(CANVAS), torch.arange(CANVAS).repeat(num_canvases)


class Pass:
    """The functions of a pass over slots that are all in different states."""

    def __init__(self, backend: str | None, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._generator = generator
        slots = CanvasSlots(SLOTS, diffusion_gemma_spec(CANVAS, 4), VOCAB, CPU)
        slots.canvas.random_(VOCAB, generator=generator)
        slots.step.copy_(torch.tensor([0, 1, 2, 3, 1]))
        slots.pinned.copy_(torch.rand(SLOTS, CANVAS, generator=generator) < 0.3)
        slots.phase[1] = int(Phase.COMMITTING)
        pass_rows = PassRows(slots, MOST_ROWS, backend)
        pass_rows.of_slots.seed.random_(generator=generator)
        self.slots, self.pass_rows = slots, pass_rows

        state = object.__new__(DiffusionGemmaModelState)
        state.slots, state.pass_rows, state.dtype = slots, pass_rows, dtype
        state.soft_embeds = self.floats(SLOTS, CANVAS, HIDDEN).to(dtype)
        state._inputs_embeds = torch.zeros(MOST_ROWS, HIDDEN, dtype=dtype)
        state._adapters = None
        table = self.floats(VOCAB, HIDDEN).to(dtype)
        state.model = SimpleNamespace(
            embed_input_ids=lambda ids: table[ids],
            self_conditioning=lambda plain, signal: signal - plain,
            is_decoder_row=torch.zeros(MOST_ROWS, dtype=torch.bool),
            model=SimpleNamespace(normalizer=torch.tensor(HIDDEN**0.5, dtype=dtype)),
        )
        state._compile(backend)
        self.state = state

        stock: Any = SimpleNamespace(
            sampling_states=None,
            logprob_token_ids_state=None,
            req_states=SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=slots.step)),
            logprobs_mode="raw_logprobs",
        )
        self.settings = PassSettings(stock, pass_rows, None, self_conditions=True)
        self.settings.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 0.3, 1.9]))
        self.functions = SamplingFunctions(
            pass_rows, self.settings, None, None, state.store_soft_embeds, None
        )

    def floats(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(*shape, generator=self._generator)

    def run(self, num_canvases: int) -> list[Tensor]:
        """Run each function for some canvases, and return everything that it wrote or returned."""
        slot, position = rows_of_slots(num_canvases)
        n = len(slot)
        self.pass_rows.slot[:n], self.pass_rows.position[:n] = slot, position
        self.state._condition_canvases(torch.arange(n).flip(0) + 4)
        draws = self.settings.draws(self.settings.select(slice(n)))
        values = PositionStatistics(
            argmax=torch.randint(VOCAB, (n,), generator=self._generator),
            candidate=torch.randint(VOCAB, (n,), generator=self._generator),
            entropy=self.floats(n),
            drawn_confidence=self.floats(n),
            confidence=self.floats(n),
        )
        self.functions._write(slot, position, values)
        self.state.store_soft_embeds(self.floats(n, HIDDEN), slot, position)
        held = [x for x in self.functions.statistics if x is not None]
        written = [self.state._inputs_embeds, self.state.soft_embeds, *held]
        return [x.clone() for x in (*draws, self.state.model.is_decoder_row, *written)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_of_rows_are_compiled_once_and_equal_to_eager(backend, dtype):
    """Another number of canvases recompiles nothing and changes no bit."""
    if backend == "inductor" and not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    eager, compiled = Pass(None, dtype), Pass(backend, dtype)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_canvases in (4, 2, 1, 0, 3, 5):
            expected, found = eager.run(num_canvases), compiled.run(num_canvases)
            for one, other in zip(expected, found, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_one_row_and_none_are_not_compiled():
    """A pass of one row, which a narrow canvas may have, does not wait for a compiler."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    double = compiled_by_rows(lambda rows: rows * 2, backend)
    assert double(torch.ones(1)).tolist() == [2.0]
    assert double(torch.ones(0)).tolist() == []
    assert not compiled
    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert double(torch.ones(4)).tolist() == [2.0] * 4
    assert len(compiled) == 1


WAYS = [compiled, compiled_by_rows]


def failing(error: Exception) -> Any:
    """Return a backend of ``torch.compile`` that raises the error."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise error

    return backend


@pytest.mark.parametrize("compile_it", WAYS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_unwritable(
    number: int, compile_it: Callable[..., Any], vllm_log: pytest.LogCaptureFixture
) -> None:
    """The function runs uncompiled from then on, once per call, and one warning says why."""
    total = torch.zeros(4)

    def add(values: Tensor) -> Tensor:
        total.add_(values)
        return total * 2

    run = compile_it(add, failing(OSError(number, os.strerror(number), "/cache/file")))
    for i in range(1, 4):
        assert run(torch.ones(4)).tolist() == [2.0 * i] * 4
    (line,) = [line for line in vllm_log.messages if "uncompiled" in line]
    assert os.strerror(number) in line
    assert "TORCHINDUCTOR_CACHE_DIR" in line


@pytest.mark.parametrize("compile_it", WAYS)
def test_other_failures(compile_it: Callable[..., Any]) -> None:
    """Another failure of the compiler is raised as it is, and so is one of what it compiled."""
    run = compile_it(lambda values: values + 1, failing(RuntimeError("a bug")))
    with pytest.raises(Exception, match="a bug"):
        run(torch.ones(4))

    def full(*inputs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = compile_it(lambda values: values + 1, lambda graph, inputs: full)
    with pytest.raises(OSError, match="No space left"):
        run(torch.ones(4))
