"""Reports of the engine, handed in an API process to the calls that requested them."""

from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from vllm_diffusion.canvas.messages import RequestReport
from vllm_diffusion.canvas.predictions import FollowedText
from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.live.frame import CanvasStepMap, added_by, frame_of
from vllm_diffusion.live.watch import Inbox, OrderedQueue, open_inbox
from vllm_diffusion.metrics import ANSWER, DiffusionRequestMetrics, metrics_of_passes
from vllm_diffusion.requests.arguments import (
    TRACE,
    WHERE_FRAMES_ARE,
    RequestArguments,
    arguments_of,
    check_watched,
)
from vllm_diffusion.requests.bounds import check_decodable
from vllm_diffusion.requests.refusals import refuse

# Attribute of an output that holds the steps which decided its tokens.
STEP_MAP = "diffusion_step_map"


def install() -> None:
    """Take reports out of the engine's outputs before vLLM sees them. Safe to call twice."""
    _with_inbox.install()


class ReportedAnswer:
    """Reports of one answer, which all of vLLM's outputs of the answer share.

    vLLM merges outputs that wait for their reader into the first of them, so that each one leads
    here.

    Attributes:
        steps: The step of each emitted token.
        trace: For each canvas, what its steps began from.
        metrics: Metrics of the finished answer; ``None`` before.
        followed: The text that the answer is expected to resemble, where the request brings one.
        num_suffix: Tokens of the request's suffix that are in sight while the answer is written.
    """

    def __init__(self, num_suffix: int = 0) -> None:
        self.steps: list[int] = []
        self.trace: list[list[list[int]]] = []
        self.metrics: DiffusionRequestMetrics | None = None
        self.followed: FollowedText | None = None
        self.num_suffix = num_suffix
        self._passes: list[int] = []

    def take(self, report: RequestReport) -> None:
        """Keep what a report adds to the answer."""
        self.steps += report.step_map
        self._passes += report.passes
        if report.trace:
            self.trace.append(report.trace)

    def finish(self, num_tokens: int) -> None:
        """Compute the metrics, and forget the steps of tokens that are not part of the answer.

        Args:
            num_tokens: Tokens of the answer.
        """
        del self.steps[num_tokens:]
        if self._passes:
            self.metrics = metrics_of_passes(self._passes)
            if self.followed is not None:
                self.metrics = replace(
                    self.metrics,
                    accepted_prediction_tokens=self.followed.accepted,
                    rejected_prediction_tokens=self.followed.rejected,
                )


class ReportedState(RequestState):
    """vLLM's state of a request in the API process, with what the engine reports of the request."""

    queue: Any

    def __init__(
        self,
        state: RequestState,
        arguments: RequestArguments,
        inbox: Inbox | None,
        prompt_index: int,
    ) -> None:
        """Take over the state that vLLM made of a request.

        Args:
            state: vLLM's, before the request's first output.
            arguments: The request's.
            inbox: Inbox of the call; ``None`` if nobody watches it.
            prompt_index: Place of the request's prompt in the call.
        """
        self.__dict__.update(vars(state))
        if inbox is not None and self.queue is not None:
            self.queue = OrderedQueue(self.queue, inbox)
        self._shown = arguments.shown
        self._inbox = inbox
        self._prompt_index = prompt_index
        self._num_canvases = 0
        self._prompt_logprobs: Any = None
        self._answer = ReportedAnswer(len(arguments.suffix) - arguments.num_closing)
        text = arguments.predicted(self.prompt_token_ids or ())
        if text is not None:
            self._answer.followed = FollowedText(text, is_prompt=arguments.predicts_prompt)

    def take(self, report: RequestReport, output: Any) -> None:
        """Keep a report, or hand it on.

        Args:
            report: The request's.
            output: vLLM's ``EngineCoreOutput``, with the tokens that come with the report.
        """
        self._answer.take(report)
        if self._answer.followed is not None and output.new_token_ids:
            self._answer.followed.advance(output.new_token_ids)
        if self._inbox is None:
            return
        for reported in report.frames:
            fields = self._shown.frame_fields
            self._inbox.put(frame_of(reported, fields, self, self._prompt_index))
        if report.step_map:
            is_stopped = output.finish_reason == FinishReason.STOP
            addition = added_by(self.detokenizer, output.new_token_ids, is_stopped)
            self._inbox.put(
                CanvasStepMap(
                    index=self.request_index,
                    prompt_index=self._prompt_index,
                    block=self._num_canvases,
                    steps=tuple(report.step_map[: addition.num_tokens]),
                )
            )
            self._num_canvases += 1
        if isinstance(self.queue, OrderedQueue):
            self.queue.wake()

    def _new_request_output(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._new_request_output(*args, **kwargs)
        if isinstance(output, RequestOutput):
            # vLLM gives them to the first output alone. Merged into a later one of another answer
            # to the prompt, it loses them, and a stream that echoes the prompt ends with an error.
            self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
            output.prompt_logprobs = self._prompt_logprobs
        return output

    def _new_completion_output(
        self, token_ids: list[int], finish_reason: Any, stop_reason: Any
    ) -> Any:
        output = super()._new_completion_output(token_ids, finish_reason, stop_reason)
        if finish_reason is not None:
            self._answer.finish(self.detokenizer.num_output_tokens())
        setattr(output, ANSWER, self._answer)
        if self._shown.step_map:
            setattr(output, STEP_MAP, self._answer.steps)
        if self._shown.trace:
            setattr(output, TRACE, self._answer.trace)
        return output


class ReportingProcessor(OutputProcessor):
    """vLLM's processor of the engine's outputs, which takes frames, step maps and counters out of
    them.
    """

    def process_outputs(self, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        of_vllm = []
        for output in engine_core_outputs:
            report = output.routed_experts
            if report is not None and not RequestReport.is_in(report):
                # Another model of this process: vLLM hands on which experts its tokens had.
                of_vllm.append(output)
                continue
            output.routed_experts = None
            state: Any = self.request_states.get(output.request_id)
            if report is not None and state is not None:
                state.take(RequestReport.decode(report), output)
            # vLLM has none in which nothing happened: it is a report alone.
            if report is None or output.new_token_ids or output.finish_reason is not None:
                of_vllm.append(output)
        return super().process_outputs(of_vllm, *args, **kwargs)


@replaces_call(
    "vllm.v1.engine.output_processor:OutputProcessor.add_request",
    reason="Opens the inbox and the queue of a request that asks for frames, and gives the processor the class that takes "
    "reports out of the engine's outputs.",
    until="EngineCoreOutput has a field for a plugin's payload, and OutputProcessor hands it to a listener.",
)
def _with_inbox(stock: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if type(self) is OutputProcessor:
        # It exists before this package sees it, but no request does.
        self.__class__ = ReportingProcessor
    params = request.sampling_params
    if params is not None:
        # Nothing changes them any more: vLLM's next step is to send them.
        check_decodable(params)
    arguments = arguments_of(params)
    shown = arguments.shown
    inbox = open_inbox()
    if shown.frame_interval and inbox is None:
        refuse("diffusion_frames", WHERE_FRAMES_ARE, shown.frame_interval)
    prompt_index = 0
    if inbox is not None:
        inbox.num_answers += 1
        check_watched(shown.frame_interval, inbox.num_answers)
        prompt_index = inbox.prompt_index(request.external_req_id)
        inbox.prompts[prompt_index] = request.prompt_token_ids or []
    stock(self, request, *args, **kwargs)
    state = self.request_states[request.request_id]
    # Further input of a request that streams its prompt finds the state there.
    if not isinstance(state, ReportedState):
        state = ReportedState(state, arguments, inbox, prompt_index)
        self.request_states[request.request_id] = state
