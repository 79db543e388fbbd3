"""Reports of the engine, handed in an API process to whoever asked for them."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.canvas.report import RequestReport
from vllm_diffusion.hooks.replacement import replaces
from vllm_diffusion.live.frame import CanvasStepMap, added_by, frame_of
from vllm_diffusion.live.inbox import MOST_WATCHED_ANSWERS, Inbox, OrderedQueue, open_inbox
from vllm_diffusion.metrics import METRICS, metrics_of_passes
from vllm_diffusion.requests.arguments import Shown, arguments_of
from vllm_diffusion.requests.engine_message import check_decodable

# Under which a finished output holds the steps that decided its tokens.
STEP_MAP = "diffusion_step_map"
# Under which it holds what each step of each canvas began from.
TRACE = "diffusion_trace"
# What is said of frames that were asked for elsewhere, behind the field's name.
WHERE_FRAMES_ARE = (
    "is sent while an answer is written: set stream to true on /v1/chat/completions or "
    "/v1/completions, the only ones that send frames; in Python use vllm_diffusion.live.watch."
)


def install() -> None:
    """Take reports out of the engine's outputs before vLLM sees them. Safe to call twice."""
    _with_inbox.install()
    _taking_reports.install()
    _with_what_was_told.install()
    _keeping_what_was_told.install()


class _Told:
    """State of the reports that a request of this process has received so far."""

    def __init__(self, shown: Shown, inbox: Inbox | None, prompt_index: int) -> None:
        self.shown = shown
        self.inbox = inbox
        self.prompt_index = prompt_index
        self.num_canvases = 0
        self.steps: list[int] = []
        self.trace: list[list[list[int]]] = []
        self.passes: list[int] = []

    def take(self, report: RequestReport, output: Any, state: Any) -> None:
        """Keep a report, or hand it on.

        Args:
            report: The request's.
            output: vLLM's ``EngineCoreOutput``, with the tokens that come with the report.
            state: vLLM's, before it takes them.
        """
        self.steps += report.step_map
        self.passes += report.passes
        if report.trace:
            self.trace.append(report.trace)
        if self.inbox is None:
            return
        for reported in report.frames:
            fields = self.shown.frame_fields
            self.inbox.put(frame_of(reported, fields, state, self.prompt_index))
        if report.step_map:
            from vllm.v1.engine import FinishReason

            is_stopped = output.finish_reason == FinishReason.STOP
            addition = added_by(state.detokenizer, output.new_token_ids, is_stopped)
            self.inbox.put(
                CanvasStepMap(
                    index=state.request_index,
                    prompt_index=self.prompt_index,
                    block=self.num_canvases,
                    steps=tuple(report.step_map[: addition.num_tokens]),
                )
            )
            self.num_canvases += 1
        if isinstance(state.queue, OrderedQueue):
            state.queue.wake()


# Of a request's state, which is vLLM's and lives as long as the request.
_TOLD = "_vllm_diffusion_told"


@replaces(
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    reason="Opens the inbox of a request that asks for frames, and its queue.",
    until="EngineCoreOutput has a field for a plugin's payload, and OutputProcessor hands it to a listener.",
)
def _with_inbox(stock: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        params = request.sampling_params
        if params is not None:
            # Nothing changes them any more: vLLM's next step is to send them.
            check_decodable(params)
        shown = arguments_of(params).shown
        inbox = open_inbox()
        if shown.frame_interval and inbox is None:
            raise VLLMValidationError(
                f"diffusion_frames {WHERE_FRAMES_ARE}",
                parameter="diffusion_frames",
                value=shown.frame_interval,
            )
        prompt_index = 0
        if inbox is not None:
            inbox.num_answers += 1
            if shown.frame_interval and inbox.num_answers > MOST_WATCHED_ANSWERS:
                raise VLLMValidationError(
                    f"diffusion_frames shows at most {MOST_WATCHED_ANSWERS} answers of one request; "
                    "lower n or the number of prompts.",
                    parameter="diffusion_frames",
                    value=shown.frame_interval,
                )
            prompt_index = inbox.prompt_index(request.external_req_id)
            inbox.prompts[prompt_index] = request.prompt_token_ids or []
        stock(self, request, *args, **kwargs)
        state = self.request_states[request.request_id]
        if inbox is not None and state.queue is not None:
            state.queue = OrderedQueue(state.queue, inbox)
        setattr(state, _TOLD, _Told(shown, inbox, prompt_index))

    return add_request


@replaces(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    reason="Takes frames, step maps and counters out of the engine's outputs.",
    until="EngineCoreOutput has a field for a plugin's payload, and OutputProcessor hands it to a listener.",
)
def _taking_reports(stock: Any) -> Any:
    def process_outputs(
        self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        of_vllm = []
        for output in engine_core_outputs:
            report, output.routed_experts = output.routed_experts, None
            state = self.request_states.get(output.request_id)
            if report is not None and state is not None:
                getattr(state, _TOLD).take(RequestReport.decode(report), output, state)
            # vLLM has none in which nothing happened: it is a report alone.
            if report is None or output.new_token_ids or output.finish_reason is not None:
                of_vllm.append(output)
        return stock(self, of_vllm, *args, **kwargs)

    return process_outputs


@replaces(
    "vllm.v1.engine.output_processor:RequestState._new_completion_output",
    reason="Hangs the step map, the trace and the counters on a finished answer.",
    until="CompletionOutput has a field for a plugin's payload.",
)
def _with_what_was_told(stock: Any) -> Any:
    def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *args: Any) -> Any:
        output = stock(self, token_ids, finish_reason, *args)
        told: _Told | None = getattr(self, _TOLD, None)
        if told is not None and finish_reason is not None:
            if told.passes:
                setattr(output, METRICS, metrics_of_passes(told.passes))
            if told.shown.step_map:
                num_tokens = self.detokenizer.num_output_tokens()
                setattr(output, STEP_MAP, tuple(told.steps[:num_tokens]))
            if told.shown.trace:
                setattr(output, TRACE, told.trace)
        return output

    return new_completion_output


@replaces(
    "vllm.outputs:RequestOutput.add",
    reason="Keeps them where outputs that wait are merged.",
    until="CompletionOutput has a field for a plugin's payload.",
)
def _keeping_what_was_told(stock: Any) -> Any:
    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        stock(self, next_output, aggregate)
        mine = {completion.index: completion for completion in self.outputs}
        for completion in next_output.outputs:
            for name in (METRICS, STEP_MAP, TRACE):
                if hasattr(completion, name):
                    setattr(mine[completion.index], name, getattr(completion, name))

    return add
