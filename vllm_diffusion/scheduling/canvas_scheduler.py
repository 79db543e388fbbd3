"""vLLM's diffusion schedulers, with canvases scheduled whole or not at all, and counted."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.diffusion_scheduler import (
    DiffusionAsyncScheduler,
    DiffusionScheduler,
    diffusion_canvas_width,
)
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.canvas.canvas_view import unpack
from vllm_diffusion.canvas.constraints import CanvasConstraint, CanvasConstraints
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.metrics import PassCounters, PassRows
from vllm_diffusion.requests.params import is_read_only
from vllm_diffusion.scheduling import outlines_rollback
from vllm_diffusion.scheduling.canvas_reports import CanvasReports
from vllm_diffusion.scheduling.constrained_canvas import (
    ConstrainedCanvas,
    DeadEndError,
    constraint_names,
    is_constrained,
)
from vllm_diffusion.scheduling.engine_seam import end_with_threads
from vllm_diffusion.scheduling.kv_transfer import KVTransferMixin
from vllm_diffusion.scheduling.last_canvas import LastCanvasMixin
from vllm_diffusion.scheduling.reads_together import ReadsTogether
from vllm_diffusion.scheduling.stuck_requests import StuckRequests
from vllm_diffusion.settings.plugin_settings import commits_in_place, fuses_encode, fuses_prompt
from vllm_diffusion.training.served_weights import why_refused

logger = init_logger(f"vllm.{__name__}")

# As vLLM's scheduler counts them.
_TOKENS_IN_FLIGHT = 2


class WholeCanvasMixin(KVTransferMixin):
    """Placed before a stock scheduler: see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        outlines_rollback.install()
        # Whether a finished canvas is encoded in the same pass as the next one's first step.
        self.fuses_encode = fuses_encode(self.vllm_config)
        # Whether the end of a prompt is, which is known in time in every order.
        self.fuses_prompt = fuses_prompt(self.vllm_config)
        # Whether a canvas is emitted by a pass whose rows are computed tokens with it.
        self.commits_in_place = commits_in_place(self.vllm_config)
        self.spec: CanvasSpec = self.vllm_config.model_config.canvas_spec
        # Of the pass that is being scheduled: its budget, and the rows of canvases that the stock
        # scheduler knows nothing of, by request.
        self._num_rows_left = 0
        self._canvases: dict[str, int] = {}
        self._seeds = np.random.default_rng(self.vllm_config.model_config.seed)
        self._counters = PassCounters()
        self._reports = CanvasReports()
        self._constrained: dict[str, ConstrainedCanvas] = {}
        # Prompt log-probabilities of requests that have not emitted a token yet.
        self._held_prompt_logprobs: dict[str, tuple[Any, Any]] = {}
        self._stuck = StuckRequests(self, self._counters)
        self._reads = ReadsTogether()
        # Whether the last pass left somebody waiting.
        self._leaves_waiting = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._give_way()
        self._num_rows_left = self.max_num_scheduled_tokens
        self._canvases.clear()
        output = super().schedule(throttle_prefills)
        self._leaves_waiting = bool(self.waiting)
        return output

    def _give_way(self) -> None:
        """Have constrained canvases past their step cap make room for requests that wait.

        Without a constraint nobody holds a place for longer, so that a constraint which is slow to
        satisfy keeps nobody waiting more than another request would. Such a canvas begins again
        behind those that wait, and then runs to its end: its tokens are the same.
        """
        if not self._leaves_waiting or self.policy != SchedulingPolicy.FCFS:
            return
        overdue = [
            request
            for request in self.running
            if (canvas := self._constrained.get(request.request_id))
            and not canvas.has_given_way
            and canvas.is_overdue(self._max_steps(request))
        ]
        for request in overdue[: len(self.waiting)]:
            self._constrained[request.request_id].has_given_way = True
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            # Which puts it before them.
            self.waiting.remove_request(request)
            self.waiting.add_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many rows the request runs: called by the stock scheduler after its own cuts.

        The hook is meant for something else, but it is the last word on every request, running or
        waiting, before blocks are allocated. A slice of a canvas would be denoised as if the rest did
        not exist, so a canvas runs whole or waits for a pass with room. Where a prompt ends, the stock
        scheduler knows of no canvas behind it, so the budget is kept here as well.
        """
        if self._reads.holds(request.request_id):
            return 0
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        # Of the prompt, or of a canvas that was emitted and has to be encoded; on the assumption
        # that a pass on its way emits its canvas.
        num_known = max(
            request.num_tokens + request.num_output_placeholders - num_computed_tokens, 0
        )
        if self.spec.is_aligned:
            num_rows = self._block_rows(request, num_computed_tokens, num_known, num_new_tokens)
        elif self.is_prefilled_only(request):
            num_rows = min(num_new_tokens, num_known)
        elif not request.spec_token_ids:
            num_rows = self._prompt_rows(request, num_computed_tokens, num_known, num_new_tokens)
        elif self._awaits_output(request):
            num_rows = max(min(num_new_tokens, num_known), 0)
        else:
            num_rows = self._canvas_rows(request, num_computed_tokens, num_known, num_new_tokens)
        self._num_rows_left -= num_rows
        return num_rows

    def _awaits_output(self, request: Request) -> bool:
        """Whether what the request's next canvas is hangs on a pass that is in flight.

        Only with pipeline stages, where several passes are; the chunks of a prompt follow one another.
        An asynchronous scheduler counts placeholders instead, and keeps the passes of a canvas apart.
        """
        return request.num_in_flight_tokens > 0

    def _prompt_rows(
        self, request: Request, num_computed_tokens: int, num_known: int, num_new_tokens: int
    ) -> int:
        """Rows of a request at its prompt, and of the canvas behind it if the prompt ends with them.

        Nothing that is in flight says what that canvas is. One that is in flight itself leaves no
        token of the prompt.
        """
        room = self.max_model_len - num_computed_tokens - num_known
        width = min(diffusion_canvas_width(request, self.num_spec_tokens), room)
        is_shared = num_new_tokens == num_known > 0 and self._shares_pass(
            request, num_computed_tokens
        )
        if is_shared and 0 < width <= self._num_rows_left - num_known:
            self._canvases[request.request_id] = width
            return num_known + width
        return max(min(num_new_tokens, num_known), 0)

    def _shares_pass(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the pass that ends the request's prompt may have its canvas too."""
        # Where loaded blocks turn out to be missing, a pass is repeated, and a canvas's step is not.
        may_be_repeated = (
            self.connector is not None
            and self.recompute_kv_load_failures
            and request.status != RequestStatus.RUNNING
            and num_computed_tokens > 0
        )
        return self.fuses_prompt and not may_be_repeated

    def _canvas_rows(
        self, request: Request, num_computed_tokens: int, num_known: int, num_new_tokens: int
    ) -> int:
        """Rows of a request that has a canvas behind its known tokens."""
        if num_new_tokens <= num_known:
            return num_new_tokens if num_known else 0
        # One that the model length cuts is as wide as it will ever be.
        room = self.max_model_len - num_computed_tokens - num_known
        width = min(
            len(request.spec_token_ids), diffusion_canvas_width(request, self.num_spec_tokens)
        )
        if room < width and request.num_output_placeholders > 0:
            # Whether the pass in flight moves on to a last, narrower canvas is not known yet.
            return 0
        is_whole = num_new_tokens - num_known >= min(width, room)
        if num_known == 0:
            return num_new_tokens if is_whole else 0
        return num_new_tokens if is_whole and self.fuses_encode else num_known

    def _block_rows(
        self, request: Request, num_computed_tokens: int, num_known: int, num_new_tokens: int
    ) -> int:
        """Rows of a request whose canvases are blocks: whole ones, of known tokens or of a canvas.

        Known tokens that do not fill a block are rows of the canvas, and computed in each of its
        passes: the stock scheduler has not counted those.
        """
        length = self.spec.length
        num_to_encode = max(num_known - self.spec.num_given(request.num_tokens), 0)
        num_rows = min(num_new_tokens, num_to_encode, self._num_rows_left)
        if num_rows < num_to_encode:
            num_rows = num_rows // length * length
        if num_to_encode == 0:
            has_canvas = not self._awaits_output(request)
        else:
            # What is in flight of a request at its prompt says nothing of its canvas.
            is_at_prompt = not request.spec_token_ids
            has_canvas = (
                self._shares_pass(request, num_computed_tokens)
                if is_at_prompt
                else self.fuses_encode
            )
        has_canvas = has_canvas and num_rows == num_to_encode
        has_room = num_computed_tokens + num_rows + length <= self.max_model_len
        if self.is_prefilled_only(request):
            has_canvas = False
        if has_canvas and has_room and num_rows + length <= self._num_rows_left:
            num_rows += length
            self._canvases[request.request_id] = length
        return num_rows

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.seed is None:
            # Each pipeline stage begins the canvases for itself. Several answers to one prompt may share
            # their parameters.
            request.sampling_params = copy.copy(params)
            request.sampling_params.seed = int(self._seeds.integers(2**63))
        if params is not None and is_read_only(params):
            # The one canvas that is read may begin with the end of the prompt.
            num_read = self.spec.length - self.spec.num_given(request.num_prompt_tokens)
            request.max_tokens = min(request.max_tokens, num_read)
        super().add_request(request)
        self._reports.add(request)
        self._reads.add(request)
        if is_constrained(request):
            self._constrained[request.request_id] = ConstrainedCanvas(
                request, self.structured_output_manager
            )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._constrained.pop(request.request_id, None)
        self._held_prompt_logprobs.pop(request.request_id, None)
        self._stuck.forget(request.request_id)
        self._reads.forget(request.request_id)
        self._counters.forget(request.request_id)
        self._reports.freed(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._stuck.forget(request.request_id)
        self._counters.forget(request.request_id)
        self._reports.preempted(request.request_id)
        if canvas := self._constrained.get(request.request_id):
            canvas.begin_again()

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        waiting = any(
            request_id in self._constrained
            and self.requests[request_id].num_output_placeholders > 0
            for request_id in scheduler_output.num_scheduled_tokens
        )
        self._add_canvases(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        # The stock code knows of grammars only.
        scheduler_output.pending_structured_output_tokens |= waiting

    def _add_canvases(self, scheduler_output: SchedulerOutput) -> None:
        """Say which rows are canvases: those behind a prompt, and all of a block, whatever is known."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in self._canvases.keys() & scheduler_output.num_scheduled_tokens.keys():
            drafts[request_id] = [-1] * self._canvases[request_id]

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Nothing: the canvases that a constraint reads come with the output of their pass.

        The stock code would cut them to a valid prefix, and what it is given is of the last pass,
        which with pipeline stages need not be these requests' own.
        """

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Constraints for the canvases of this pass, from the argmax canvases of the last one."""
        constraints: dict[str, CanvasConstraint] = {}
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            canvas = self._constrained.get(request_id)
            if canvas is None or request_id not in self.requests:
                continue
            request = self.requests[request_id]
            num_given = self.spec.num_given(request.num_tokens)
            constraint = self._constraint(request, canvas, len(tokens) - num_given)
            constraints[request_id] = replace(constraint, num_given=num_given)
        if not constraints:
            return None
        return CanvasConstraints(
            list(constraints), np.empty((0, 0), np.int32), None, list(constraints.values())
        )

    def _constraint(
        self, request: Request, canvas: ConstrainedCanvas, width: int
    ) -> CanvasConstraint:
        """What holds for a request's canvas; one whose constraint fails ends, and no other."""
        try:
            return canvas.constraint(width, self._max_steps(request))
        except DeadEndError:
            reason = "allows no token here"
        except Exception as error:
            # Of a grammar's back end: each has its own, and the engine is not to end with them.
            logger.warning(
                "The constraint of request %s failed.", request.request_id, exc_info=True
            )
            reason = f"failed here ({type(error).__name__}: {error})"
        self._stuck.stop(request, f"{constraint_names(request)} {reason}")
        return CanvasConstraint((), None, restart=False, num_valid=0)

    def _max_steps(self, request: Request) -> int:
        """The request's step cap."""
        assert request.sampling_params is not None
        cap = self.spec.max_denoising_steps
        own = (request.sampling_params.extra_args or {}).get("diffusion_max_steps")
        return min(own, cap) if own else cap

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._count_passes(scheduler_output, model_runner_output)
        self._hold_prompt_logprobs(model_runner_output)
        refused: dict[int, EngineCoreOutputs] = {}
        if reason := why_refused(self.vllm_config):
            self._stuck.refuse_all(refused, reason)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client, told in refused.items():
            outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(told.outputs)
        self._stuck.end(outputs)
        self._reports.attach(outputs)
        return outputs

    def _count_passes(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        """Record each request's rows in this pass, before the stock code finishes any of them."""
        emitted = model_runner_output.sampled_token_ids or []
        views = model_runner_output.aux_output_connector_output or {}
        for req_id, num_rows in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            canvas = scheduler_output.scheduled_spec_decode_tokens.get(req_id) or ()
            index = model_runner_output.req_id_to_index[req_id]
            num_emitted = len(emitted[index]) if emitted else 0
            # A pass that was on its way when its request was preempted is no step of a canvas; what it
            # emits counts all the same.
            is_stale = request.num_stale_output_tokens > 0
            is_void = is_stale and (num_emitted == 0 or request.drop_stale_output)
            view = None if is_void or req_id not in views else unpack(views[req_id])
            if is_stale and not is_void:
                self._reports.emitted_after_all(req_id)
            constrained = self._constrained.get(req_id)
            if canvas and not is_stale:
                num_settled = constrained.num_settled if constrained else 0
                self._stuck.observe(request, num_settled, num_emitted, self._max_steps(request))
            if constrained and view and not num_emitted:
                constrained.denoised(view.tokens.tolist())
            elif constrained and num_emitted and not is_stale:
                constrained.begin()
            num_canvas_rows = len(canvas)
            denoised = num_canvas_rows
            encodes = self.commits_in_place and not self.spec.rule.can_finish_kv
            if num_emitted and encodes and not is_read_only(request.sampling_params):
                denoised = 0
            rows = PassRows(num_rows - denoised, denoised, num_canvas_rows, num_emitted)
            self._counters.observe(req_id, rows, self._max_steps(request))
            self._reports.observe(req_id, rows, view)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Before the stock code registers computed blocks for the prefix cache."""
        if self.commits_in_place:
            if not is_stale:
                # Rows of the canvas too, which no token was emitted for.
                request.num_computed_tokens += self.spec.num_given(request.num_tokens)
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        if is_stale:
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        # The rows of the step that emitted them were a canvas's, not those of an encoded text.
        num_encoded = request.num_computed_tokens - len(new_token_ids)
        result = super()._update_request_with_output(request, new_token_ids, is_stale)
        request.num_computed_tokens = num_encoded
        return result

    def _hold_prompt_logprobs(self, model_runner_output: ModelRunnerOutput) -> None:
        """Keep them for the pass that emits the request's first canvas.

        The engine's loop takes them together with a token only; a prompt's last pass yields none.
        """
        emitted = model_runner_output.sampled_token_ids or []
        both = (
            model_runner_output.prompt_logprobs_dict,
            model_runner_output.prompt_token_id_logprobs_dict,
        )
        for req_id, index in model_runner_output.req_id_to_index.items():
            found = tuple(of.pop(req_id, None) for of in both)
            request = self.requests.get(req_id)
            if request is None:
                # Ended while the pass was on its way.
                continue
            if found[0] is not None:
                found = (_of_prompt(found[0], request.num_prompt_tokens), found[1])
            if any(part is not None for part in found):
                self._held_prompt_logprobs[req_id] = found
            if emitted and emitted[index] and req_id in self._held_prompt_logprobs:
                held = self._held_prompt_logprobs.pop(req_id)
                for of, part in zip(both, held, strict=True):
                    if part is not None:
                        of[req_id] = part

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        stats = super().make_stats(spec_decoding_stats, *args, **kwargs)
        if stats is not None:
            stats.spec_decoding_stats = self._counters.attach(
                stats.spec_decoding_stats, self.num_spec_tokens
            )
        return stats


def _of_prompt(logprobs: LogprobsTensors, num_prompt_tokens: int) -> LogprobsTensors | None:
    """Those of a prompt's tokens, without those of a canvas that shared the last pass."""
    num_rows = num_prompt_tokens - 1
    if num_rows == 0:
        return None
    return LogprobsTensors(
        logprobs.logprob_token_ids[:num_rows],
        logprobs.logprobs[:num_rows],
        logprobs.selected_token_ranks[:num_rows],
    )


class CanvasScheduler(LastCanvasMixin, WholeCanvasMixin, DiffusionScheduler):
    """Synchronous: each pass is scheduled with the last one's result in hand.

    A canvas is emitted in the step that converges. If the request goes on, its tokens are known but
    not computed, and are encoded like a prompt; the last canvas only with ``keep_last_canvas``.
    With a rule that leaves final keys and values it is emitted by the pass that wrote them.
    """

    takes_drafts = False  # for engine_seam.py: canvases are the scheduler's own

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # A canvas may follow what has been computed now.
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if not request.is_prefill_chunk and not self._awaits_output(request):
                width = diffusion_canvas_width(request, self.num_spec_tokens)
                request.spec_token_ids = [-1] * width
        return outputs


class AsyncCanvasScheduler(WholeCanvasMixin, DiffusionAsyncScheduler):
    """Asynchronous: the next pass is scheduled while this one runs.

    Which step converges is not known in time, so the next pass over the same rows encodes the
    canvas and emits it: the last one too, with or without ``keep_last_canvas``.
    """

    def _awaits_output(self, request: Request) -> bool:
        return False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # The stock code holds a request back whose pass in flight is sure to bring its last two
        # tokens. A canvas is sure of nothing, and what a constraint has to be told of it comes with
        # the next pass.
        constrained = [
            request for request in self.running if request.request_id in self._constrained
        ]
        for request in constrained:
            request.max_tokens += _TOKENS_IN_FLIGHT
        try:
            return super().schedule(throttle_prefills)
        finally:
            for request in constrained:
                request.max_tokens -= _TOKENS_IN_FLIGHT


def canvas_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> DiffusionScheduler:
    """The scheduler of a diffusion model, chosen when vLLM has decided on asynchronous scheduling."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = AsyncCanvasScheduler if is_async else CanvasScheduler
    end_with_threads()
    return scheduler_cls(vllm_config=vllm_config, **kwargs)
