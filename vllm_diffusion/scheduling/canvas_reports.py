"""Reports of the scheduler about requests, besides their tokens: frames, step maps, counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_diffusion.canvas.messages import CanvasView, ReportedFrame, RequestReport
from vllm_diffusion.requests.arguments import Shown, arguments_of, end_token_ids
from vllm_diffusion.scheduling.features import ReturnedPart, SchedulerFeature


@dataclass
class _ReportState:
    """State of one request's reports.

    Attributes:
        request: vLLM's request.
        shown: Reports that the request asks for.
        end_tokens: Token ids that end the answer.
        num_canvases: Number of canvases that it emitted.
        is_lost: True if a canvas of which frames were sent is lost.
        last_frame: Frame of a finished canvas, until the canvas is emitted.
        trace: Trace of the canvas that is being denoised, as in :class:`RequestReport`.
        passes: Counts since the last report, as in :class:`RequestReport`; ``None`` after the
            answer.
        report: Report of this pass.
    """

    request: Request
    shown: Shown
    end_tokens: Sequence[int]
    num_canvases: int = 0
    is_lost: bool = False
    last_frame: ReportedFrame | None = None
    trace: list[list[int]] = field(default_factory=list)
    passes: list[int] | None = field(default_factory=list)
    report: RequestReport | None = None

    def would_commit(self, tokens: np.ndarray) -> tuple[int, bool, bool]:
        """Compute what the stock scheduler would take of a canvas, by the order of its own checks.

        Returns:
            The number of tokens, true if the last one is an end token, and true if the request
            would end.
        """
        request = self.request
        room = min(len(tokens), request.max_tokens - request.num_output_tokens)
        ends = np.flatnonzero(np.isin(tokens[:room], self.end_tokens))
        num_tokens, is_stopped = (int(ends[0]) + 1, True) if ends.size else (room, False)
        fills = request.num_output_tokens + num_tokens >= request.max_tokens
        assert request.sampling_params is not None
        detection = request.sampling_params.repetition_detection
        if detection is not None:
            answer = list(request.output_token_ids)
            for i, token in enumerate(tokens[: num_tokens - (is_stopped or fills)].tolist()):
                answer.append(token)
                is_long_enough = len(answer) >= request.sampling_params.min_tokens
                if is_long_enough and check_sequence_repetition(answer, detection):
                    return i + 1, False, True
        return num_tokens, is_stopped, is_stopped or fills

    def trace_step(self, view: CanvasView) -> None:
        """Add the canvas that a step began from and, after the last step, its result."""
        if not view.denoised:
            return
        if view.step == 1:
            # A canvas that was lost begins anew, so its trace does too.
            self.trace.clear()
        began_from = view.began_from.tolist()
        self.trace.append(began_from)
        if view.done:
            given = began_from[: len(began_from) - len(view.tokens)]
            self.trace.append(given + view.tokens.tolist())


class CanvasReports(SchedulerFeature):
    """Reports of all requests, attached to the engine's outputs of a pass."""

    def __init__(self) -> None:
        self._states: dict[str, _ReportState] = {}
        self._reporting: set[str] = set()
        self._freed: list[str] = []

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        assert params is not None
        shown = arguments_of(params).shown
        self._states[request.request_id] = _ReportState(request, shown, end_token_ids(params))

    def preempt_request(self, request: Request) -> None:
        self._states[request.request_id].is_lost = True

    def remove_request(self, request_id: str) -> None:
        # The request's last output, if there is one, is that of this pass.
        self._freed.append(request_id)

    def observe(self, part: ReturnedPart) -> None:
        request_id, rows, view = part.request.request_id, part.counts, part.view
        state = self._states[request_id]
        if part.is_stale and not part.is_lost:
            # The canvas that was taken for lost is emitted by the pass that was in flight.
            state.is_lost = False
        if state.passes is not None:
            state.passes += (rows.encoded, rows.denoised, rows.projected, rows.num_emitted)
        if view is not None:
            self._observe_view(state, view)
        if rows.num_emitted > 0:
            if state.last_frame is not None:
                self._report(state).frames.append(state.last_frame)
                state.last_frame = None
            state.num_canvases += 1

    def _report(self, state: _ReportState) -> RequestReport:
        """Return the request's report of this pass."""
        self._reporting.add(state.request.request_id)
        if state.report is None:
            state.report = RequestReport()
        return state.report

    def _observe_view(self, state: _ReportState, view: CanvasView) -> None:
        if view.denoised:
            # A canvas that was done, and was lost before it was emitted, begins anew.
            state.last_frame = None
            interval = state.shown.frame_interval
            if interval and view.done:
                state.last_frame = _frame(state, view)
            elif interval and view.step % interval == 0:
                self._report(state).frames.append(_frame(state, view))
        if state.shown.step_map and view.num_emitted:
            self._report(state).step_map += view.decided_step[: view.num_emitted].tolist()
        if state.shown.trace:
            state.trace_step(view)
            if view.num_emitted:
                self._report(state).trace, state.trace = state.trace, []

    def finish_pass(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Attach the reports to the engine's outputs of this pass."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._attach(output)
        for request_id in list(self._reporting):
            state = self._states[request_id]
            output = EngineCoreOutput(request_id, [])
            self._attach(output)
            outputs.setdefault(state.request.client_index, EngineCoreOutputs()).outputs.append(
                output
            )
        self._reporting.clear()
        for request_id in self._freed:
            self._states.pop(request_id, None)
        self._freed.clear()

    def _attach(self, output: EngineCoreOutput) -> None:
        state = self._states.get(output.request_id)
        if state is None:
            return
        report, state.report = state.report, None
        self._reporting.discard(output.request_id)
        is_finished = output.finish_reason is not None
        if state.passes and (output.new_token_ids or is_finished):
            # Not only at the end, since the engine does not learn of a stop string.
            report = report or RequestReport()
            # The pass that encodes the last canvas for the next turn is not part of the answer.
            report.passes, state.passes = state.passes, None if is_finished else []
        if report is not None:
            # After an end token nothing is part of the answer.
            num_tokens = len(output.new_token_ids)
            del report.step_map[num_tokens:]
            for frame in report.frames:
                if frame.is_last:
                    frame.num_shown, frame.is_ended = num_tokens, is_finished
                    frame.is_stopped = output.finish_reason == FinishReason.STOP
            output.routed_experts = report.encode()


def _frame(state: _ReportState, view: CanvasView) -> ReportedFrame:
    """Make the frame of a canvas's step."""
    num_shown, is_stopped, is_ended = state.would_commit(view.tokens)
    begins_anew, state.is_lost = state.is_lost, False
    fields = state.shown.frame_fields
    return ReportedFrame(
        block=state.num_canvases,
        step=view.step,
        max_steps=view.max_steps,
        is_last=view.done,
        begins_anew=begins_anew,
        num_shown=num_shown,
        is_stopped=is_stopped,
        is_ended=is_ended,
        tokens=view.tokens.tobytes(),
        kept=view.kept.astype(np.uint8).tobytes() if "kept" in fields else b"",
        entropy=view.entropy.tobytes() if "entropy" in fields else b"",
    )
