"""Messages about canvases between worker, scheduler and API process.

The scheduler sends a worker :class:`CanvasGrammarOutput` with a pass, and the worker answers with a
row for each canvas that somebody watches (:class:`CanvasView`). A :class:`RequestReport` travels on
to the API process: vLLM's output of a request has one field for arrays that ride along with a pass
(``routed_experts``, which no diffusion model is started with), and a report is in it as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput

from vllm_diffusion.canvas.step import StepOutput


@dataclass(frozen=True)
class AllowedTokens:
    """Tokens that one pass may draw in a constrained canvas.

    Positions are counted from the first that is not a known token.

    Attributes:
        pinned: Tokens of the leading positions.
        frontier_mask: [ceil(vocab_size / 32)], int32: a bit for every token allowed at the position
            after them; ``None`` if all are.
        restart: Denoise what follows the frontier anew.
        num_valid: Leading positions of the previous step's argmax canvas that satisfy the
            constraint and are all that will be read; 0 if it does not satisfy it, and may not be
            emitted.
        num_given: Positions of the canvas before them, which are known tokens.
    """

    pinned: tuple[int, ...]
    frontier_mask: np.ndarray | None
    restart: bool
    num_valid: int
    num_given: int = 0


@dataclass
class CanvasGrammarOutput(GrammarOutput):
    """vLLM's message from the scheduler to the sampler, with what each canvas may draw."""

    allowed: list[AllowedTokens] = field(default_factory=list)


_NUMBERS = 7


class CanvasView:
    """A canvas after a pass, read from its row of :func:`pack`. P is its number of positions that
    are no known tokens.

    Attributes:
        denoised: True if the pass was a step of it.
        done: True if that was its last one.
        step: Steps that it has taken, this one among them.
        max_steps: The step cap.
        num_emitted: Tokens of it that the pass emitted; 0 before it is done.
        began_from: [num_rows], int32, what the pass began from, known tokens first.
        tokens: [P], int32, what it would emit.
        kept: [P], bool, positions that enter the next step, or are emitted, as they are.
        decided_step: [P], int32, the step that last wrote each position: 1 is the first, 0 the pass
            before it, or none where the request pins a token.
        entropy: [P], float32, nats.
    """

    def __init__(self, row: np.ndarray) -> None:
        """Name the parts of a row.

        Args:
            row: [7 + 5 * C], int32, on the host.
        """
        numbers = row[:_NUMBERS].tolist()
        denoised, done, self.step, self.max_steps, num_rows, num_given, self.num_emitted = numbers
        self.denoised, self.done = bool(denoised), bool(done)
        began_from, tokens, kept, decided_step, entropy = row[_NUMBERS:].reshape(5, -1)
        # The tokens begin with the first that is not known; the rest begins with the canvas.
        of_canvas = slice(num_given, num_rows)
        self.began_from: np.ndarray = began_from[:num_rows]
        self.tokens: np.ndarray = tokens[: max(num_rows - num_given, 0)]
        self.kept = kept[of_canvas].astype(bool)
        self.decided_step: np.ndarray = decided_step[of_canvas]
        self.entropy: np.ndarray = entropy[of_canvas].view(np.float32)


def pack(
    output: StepOutput,
    began_from: Tensor,
    num_rows: Tensor,
    max_steps: Tensor,
    entropy: Tensor,
    slot: Tensor,
) -> Tensor:
    """Pack the canvases of some slots into rows for :class:`CanvasView`.

    Args:
        output: Outcome of the pass.
        began_from: [R, C], int64, the canvases before it.
        num_rows: [R], int32, canvas rows of each slot in it.
        max_steps: [R], int32.
        entropy: [R, C], float32.
        slot: [n], int64.

    Returns:
        [n, 7 + 5 * C], int32.
    """
    numbers = (
        output.denoised,
        output.done,
        output.step,
        max_steps,
        num_rows,
        output.num_given,
        output.num_emitted,
    )
    positions = (
        began_from,
        output.tokens,
        output.kept,
        output.decided_step,
        entropy.view(torch.int32),
    )
    return torch.cat(
        [
            torch.stack([number[slot].to(torch.int32) for number in numbers], dim=1),
            *(values[slot].to(torch.int32) for values in positions),
        ],
        dim=1,
    )


class ReportedFrame(msgspec.Struct, array_like=True):
    """A canvas as it stood after a step.

    Attributes:
        block: Canvases of the request before it.
        step: From 1 on.
        max_steps: The step cap.
        is_last: Whether the canvas is done.
        begins_anew: Whether it was begun before, and lost with a preemption.
        num_shown: Leading tokens that an answer would hold if it were emitted as it is.
        is_stopped: Whether the last of these is a token at which the request stops.
        is_ended: Whether the request would end with them, for this or another reason.
        tokens: int32, what it would emit.
        kept: uint8, 1 where a token stays; empty if the request wants none.
        entropy: float32, nats; empty if the request wants none.
    """

    block: int
    step: int
    max_steps: int
    is_last: bool
    begins_anew: bool
    num_shown: int
    is_stopped: bool
    is_ended: bool
    tokens: bytes
    kept: bytes = b""
    entropy: bytes = b""


class RequestReport(msgspec.Struct, array_like=True):
    """Report of one request with one pass.

    Attributes:
        frames: Canvases that are being denoised.
        step_map: The step that decided each token which the pass emitted, if the request wants it.
        trace: Steps of the canvas that the pass emitted, if the request wants them: what each of
            them began from, and what the last one left; known tokens first.
        passes: With tokens: for each pass since the last ones, causal rows, canvas rows, projected
            rows and emitted tokens.
    """

    frames: list[ReportedFrame] = []
    step_map: list[int] = []
    trace: list[list[int]] = []
    passes: list[int] = []

    def encode(self) -> np.ndarray:
        """[num_bytes], uint8."""
        return np.frombuffer(msgspec.msgpack.encode(self), dtype=np.uint8)

    @staticmethod
    def is_in(array: np.ndarray) -> bool:
        """Return true for an array of :meth:`encode`; experts are [num_tokens, num_layers,
        top_k].
        """
        return array.ndim == 1 and array.dtype == np.uint8

    @staticmethod
    def decode(array: np.ndarray) -> RequestReport:
        """The inverse of :meth:`encode`."""
        return _DECODER.decode(np.ascontiguousarray(array).data)


_DECODER = msgspec.msgpack.Decoder(RequestReport)
