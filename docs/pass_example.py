"""The example of ``docs/develop/internals.md``: three requests in one pass, run by the code that
serves them.

The slots, the rows, the rule and the step are the package's. The scheduler and the model do not
run: the rows of each request and the model's answers are written down here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import FreeCanvas
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.decoding.ways import PassOrder

if TYPE_CHECKING:
    from vllm_diffusion.canvas.pass_rows import EngineRows, PassRows
    from vllm_diffusion.canvas.slots import CanvasSlots
    from vllm_diffusion.canvas.step import StepOutput

NUM_SLOTS, LENGTH, MAX_ROWS, VOCAB = 4, 4, 16, 100
# What the runner leaves in rows that it knows no token of.
UNKNOWN = 0


@dataclass(frozen=True)
class RequestRows:
    """Rows of a request in a pass: known tokens, then a whole canvas.

    Attributes:
        name: Its name on the page.
        slot: The slot that it owns.
        num_computed: Tokens that earlier passes computed.
        prompt: The tokens of its prompt.
    """

    name: str
    slot: int
    num_computed: int
    prompt: tuple[int, ...]

    @property
    def num_known(self) -> int:
        """Rows of the prompt."""
        return len(self.prompt) - self.num_computed

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.num_known + LENGTH


A = RequestRows("A", slot=2, num_computed=3, prompt=(11, 12, 13))
B = RequestRows("B", slot=0, num_computed=5, prompt=(21, 22, 23, 24, 25))
# Two tokens of its prompt were computed as an earlier chunk.
C = RequestRows("C", slot=1, num_computed=2, prompt=(31, 32, 33, 34, 35))


@dataclass(frozen=True)
class Pass:
    """A pass that ran.

    Attributes:
        requests: Its requests, in the order of the batch.
        batch: The fields of vLLM's ``InputBatch`` that were read, and the token ids that were
            filled.
        rows: The places of its rows.
        before: Tensors of the slots by name, before the step.
        statistics: The model's answer.
        output: The outcome by slot.
        after: Those tensors after the step.
        engine: The outcome by request.
    """

    requests: Sequence[RequestRows]
    batch: SimpleNamespace
    rows: PassRows
    before: dict[str, Tensor]
    statistics: PositionStatistics
    output: StepOutput
    after: dict[str, Tensor]
    engine: EngineRows


def _batch_of(requests: Sequence[RequestRows]) -> SimpleNamespace:
    """Return the batch as vLLM's runner makes it: requests with fewer rows first."""
    known = np.array([request.num_known for request in requests])
    starts = np.concatenate([[0], np.cumsum(known + LENGTH)]).astype(np.int32)
    prompt_lens = np.array([len(request.prompt) for request in requests])
    ids = [(*r.prompt[r.num_computed :], *[UNKNOWN] * LENGTH) for r in requests]
    return SimpleNamespace(
        num_reqs=len(requests),
        num_tokens=int(starts[-1]),
        idx_mapping_np=np.array([request.slot for request in requests]),
        num_scheduled_tokens=known + LENGTH,
        cu_num_logits_np=np.arange(len(requests) + 1) * LENGTH,
        query_start_loc_np=starts,
        prefill_len_np=prompt_lens,
        num_computed_prefill_tokens_np=prompt_lens - known,
        is_prefilling_np=known > 0,
        input_ids=torch.tensor(np.concatenate(ids), dtype=torch.int32),
    )


def _state(slots: CanvasSlots) -> dict[str, Tensor]:
    names = ("phase", "canvas", "step", "canvas_idx")
    return {name: getattr(slots, name).clone() for name in names}


@cache
def example() -> Pass:
    """Run the passes that lead to the example, and return the example itself."""
    from vllm_diffusion.canvas.pass_rows import PassRows
    from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
    from vllm_diffusion.canvas.step import CanvasStep
    from vllm_diffusion.requests.arguments import RequestArguments

    settings = {**EntropyBound.presets["balanced"], "t_min": 0.4, "t_max": 0.8}
    spec = CanvasSpec.of(FreeCanvas(LENGTH), EntropyBound(), 48, settings)
    order = PassOrder.of(spec.ways[0], is_async=True, own_attention=True)
    slots = CanvasSlots(NUM_SLOTS, spec, VOCAB, torch.device("cpu"))
    rows = PassRows(slots, MAX_ROWS, None)
    step = CanvasStep(slots, commits=lambda way: order.commits, compile_backend=None)
    known = torch.zeros(NUM_SLOTS, MAX_ROWS, dtype=torch.int32)
    num_computed = torch.zeros(NUM_SLOTS, dtype=torch.int32)
    statistics = spec.statistics(NUM_SLOTS, torch.device("cpu"))

    def begin(request: RequestRows) -> None:
        seed = 20 + request.slot
        slots.add_request(request.slot, NewRequest(RequestArguments(), seed=seed))
        rows.of_slots.seed[request.slot] = seed

    def answer(
        request: RequestRows, argmax: list[int], candidate: list[int], entropy: list[float]
    ) -> None:
        statistics.argmax[request.slot] = torch.tensor(argmax)
        statistics.candidate[request.slot] = torch.tensor(candidate)
        statistics.entropy[request.slot] = torch.tensor(entropy)

    def run(*requests: RequestRows) -> Pass:
        slots.apply_staged_writes()
        batch = _batch_of(requests)
        rows.lay_out(batch)
        for request in requests:
            num_computed[request.slot] = request.num_computed
            known[request.slot, : len(request.prompt)] = torch.tensor(request.prompt)
        rows.fill_ids(batch, known, num_computed)
        before = _state(slots)
        output = step(statistics, rows.of_slots)
        engine = rows.for_engine(output)
        return Pass(requests, batch, rows, before, statistics, output, _state(slots), engine)

    begin(B)
    answer(B, [51, 52, 53, 54], [51, 52, 53, 54], [0.0, 0.01, 0.02, 0.03])
    run(B)
    begin(A)
    answer(A, [41, 42, 43, 48], [41, 42, 47, 49], [0.01, 0.2, 0.9, 1.5])
    # The same tokens again, and certain: B's last step.
    answer(B, [51, 52, 53, 54], [51, 52, 53, 54], [0.0, 0.0, 0.0, 0.0])
    run(A, B)
    begin(C)
    answer(A, [41, 42, 43, 44], [41, 42, 43, 46], [0.0, 0.02, 0.3, 1.1])
    answer(C, [61, 68, 61, 61], [61, 67, 65, 69], [0.05, 0.9, 1.5, 2.0])
    return run(A, B, C)


def by_request() -> Iterator[Sequence[str]]:
    """Yield the head and the rows of a table of the requests, before the pass."""
    done = example()
    yield [
        "request",
        "`slots`",
        "tokens computed before",
        "prompt rows",
        "canvas rows",
        "`query_start_loc`",
        "`starts`",
        "`num_causal`",
    ]
    columns = (
        [*(request.name for request in done.requests), "end"],
        done.rows.requests.slots,
        [request.num_computed for request in done.requests],
        [request.num_known for request in done.requests],
        np.diff(done.batch.cu_num_logits_np),
        done.batch.query_start_loc_np,
        done.rows.requests.starts,
        done.rows.num_causal.tolist()[: len(done.requests)],
    )
    for cells in zip_longest(*columns, fillvalue=""):
        yield [str(cell) for cell in cells]


def by_row() -> Iterator[Sequence[str]]:
    """Yield the head and the rows of a table with a column for each row of the pass."""
    done = example()
    starts = done.batch.query_start_loc_np
    within = [(r, i) for r in done.requests for i in range(r.num_rows)]
    num_causal = done.rows.num_causal.tolist()
    is_causal = [i < num_causal[done.requests.index(request)] for request, i in within]
    yield ["row", *(str(row) for row in range(starts[-1]))]
    yield ["request", *(request.name for request, _ in within)]
    yield ["token position", *(str(request.num_computed + i) for request, i in within)]
    yield ["`input_ids`", *(str(token) for token in done.batch.input_ids.tolist())]
    yield ["causal", *(_cell("causal", row) for row in is_causal)]
    # Each sampled row below the row of the pass that it is.
    index = done.rows.index.tolist()[: done.rows.num_rows]
    for name in ("index", "hidden_index", "slot", "position", "offset"):
        entries = dict(zip(index, getattr(done.rows, name).tolist(), strict=False))
        yield [f"`{name}`", *(str(entries.get(row, "")) for row in range(starts[-1]))]


def by_slot() -> Iterator[Sequence[str]]:
    """Yield the head and the rows of a table with a column for each slot: what the step reads and
    writes.
    """
    done = example()
    owners = {request.slot: request.name for request in done.requests}
    yield ["", "", *(f"slot {slot}: {owners.get(slot, 'free')}" for slot in range(NUM_SLOTS))]
    parts: dict[str, dict[str, Tensor]] = {
        "before": done.before,
        "`PositionStatistics`": {
            name: getattr(done.statistics, name) for name in ("argmax", "candidate", "entropy")
        },
        "`of_slots`": {"num_rows": done.rows.of_slots.num_rows},
        "`StepOutput`": {
            name: getattr(done.output, name)
            for name in ("denoised", "kept", "done", "tokens", "num_emitted", "num_finished")
        },
        "after": done.after,
    }
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            yield [part, f"`{name}`", *(_cell(name, value) for value in tensor.tolist())]
            part = ""


def _cell(name: str, value: float | list[float]) -> str:
    from vllm_diffusion.canvas.slots import Phase

    if isinstance(value, list):
        return " ".join(_cell(name, entry) for entry in value)
    if name == "phase":
        return f"`{Phase(int(value)).name}`"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def for_engine() -> Iterator[Sequence[str]]:
    """Yield the head and the rows of a table of what the engine receives, and counts from it."""
    done = example()
    yield ["request", *(f"`{name}`" for name in done.engine._fields), "tokens computed after"]
    columns = (column.tolist() for column in done.engine)
    for request, tokens, num_sampled, num_rejected in zip(done.requests, *columns, strict=True):
        computed = request.num_computed + request.num_rows - num_rejected
        yield [
            request.name,
            _cell("tokens", tokens),
            str(num_sampled),
            str(num_rejected),
            str(computed),
        ]
