"""Report of a request besides its tokens, on its way from the engine to the API process.

vLLM's output of a request has one field for arrays that ride along with a pass (``routed_experts``,
which no diffusion model is started with); a report is in it as bytes.
"""

from __future__ import annotations

import msgspec
import numpy as np


class ReportedFrame(msgspec.Struct, array_like=True):
    """A canvas as it stood after a step.

    Attributes:
        block: Canvases of the request before it.
        step: From 1 on.
        max_steps: The step cap.
        is_last: Whether the canvas is done.
        begins_anew: Whether it was begun before, and lost with a preemption.
        num_shown: Leading tokens that an answer would hold if it were committed as it is.
        is_stopped: Whether the last of these is a token at which the request stops.
        is_ended: Whether the request would end with them, for this or another reason.
        tokens: int32, what it would commit.
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
        trace: Steps of the canvas that the pass emitted, if the request wants them: what each of them
            began from, and what the last one left; known tokens first.
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
    def decode(array: np.ndarray) -> RequestReport:
        """The inverse of :meth:`encode`."""
        return _DECODER.decode(np.ascontiguousarray(array).data)


_DECODER = msgspec.msgpack.Decoder(RequestReport)
