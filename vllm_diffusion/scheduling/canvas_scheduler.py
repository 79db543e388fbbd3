"""Schedulers for canvases, which are scheduled whole or not at all.

:class:`CanvasScheduling` precedes one of vLLM's two diffusion schedulers in the method resolution
order. Its methods are hooks of vLLM's scheduler, in the order in which a pass calls them;
everything else is in features (subclasses of ``SchedulerFeature``).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.canvas.messages import CanvasView
from vllm_diffusion.decoding.layouts import AnswerSizes, ScheduledRequest
from vllm_diffusion.decoding.ways import PassOrder
from vllm_diffusion.metrics import EngineCounts, RowCounts
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.scheduling.canvas_reports import CanvasReports
from vllm_diffusion.scheduling.constraints import Constraints
from vllm_diffusion.scheduling.empty_answers import EmptyAnswers
from vllm_diffusion.scheduling.features import PromptLogprobs, ReturnedPart, SchedulerFeature
from vllm_diffusion.scheduling.grammars import EngineGrammars, OrdinaryGrammars
from vllm_diffusion.scheduling.prefix_hashes import PrefixHashes
from vllm_diffusion.scheduling.stuck_requests import StuckRequests
from vllm_diffusion.scheduling.turns import Turns
from vllm_diffusion.startup.engine_process import end_with_threads
from vllm_diffusion.startup.plan import DiffusionPlan
from vllm_diffusion.weights.adapters.adapter_rows import AdapterLoad

# Tokens in flight of a request, as vLLM's scheduler counts them.
_TOKENS_IN_FLIGHT = 2
# vLLM's default of --seed; an operator who sets it cannot be distinguished from one who does not.
_UNSET_SEED = 0


class CanvasScheduling(Scheduler):
    """Mixin that precedes a stock scheduler: see the module's docstring.

    Attributes:
        spec: Description of canvases.
        constraints: Canvases with a grammar, bad words or a thinking budget.
        prompt_logprobs: Log-probabilities of prompts that wait for a token.
        stuck: Feature that ends requests without progress.
    """

    is_async: ClassVar[bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The engine holds this object too.
        EngineGrammars.of(self.structured_output_manager)
        if self.policy == SchedulingPolicy.FCFS:
            self.waiting = Turns()
        plan: DiffusionPlan = self.vllm_config.model_config.diffusion
        assert plan.spec is not None
        self.spec = spec = plan.spec
        self._orders = [plan.order(self.is_async, way) for way in spec.ways]
        # Rows that the next pass has left, and canvas rows beyond the granted ones, by request.
        self._num_rows_left = 0
        self._num_added: dict[str, int] = {}
        self._seeds = source_of_seeds(self.vllm_config)
        self._prefix_hashes = None
        if self.cache_config.enable_prefix_caching and spec.layout.crosses_cache_blocks:
            size = self.hash_block_size
            self._prefix_hashes = PrefixHashes(spec.layout, self.cache_config, size)
        # Requests whose next block found no room for its pictures in the pass, in its order.
        self._lacking_pictures: list[Request] = []
        # True if the last pass left requests waiting.
        self._leaves_waiting = False
        self._counters = EngineCounts(spec)
        self.stuck = StuckRequests(self, self._counters)
        self.constraints = Constraints(self, spec, self.stuck)
        self.prompt_logprobs = PromptLogprobs(self)
        # In the order in which each verb is called.
        self._features: tuple[SchedulerFeature, ...] = (
            # First, since it may give a request what constrains its canvases.
            EmptyAnswers(self, spec, self._counters, never_empty=plan.settings.never_empty),
            self.stuck,
            self.constraints,
            self.prompt_logprobs,
            CanvasReports(),
        )

    def _order_of(self, request: Request) -> PassOrder:
        """Return what the passes of the request's canvases do."""
        return self._orders[arguments_of(request.sampling_params).way]

    def _canvas_width(self, request: Request, num_known: int) -> int:
        """Return the width of the request's canvas after ``num_known`` tokens, in tokens."""
        arguments = arguments_of(request.sampling_params)
        num_after = len(arguments.suffix)
        answer = AnswerSizes(
            arguments.canvas_length,
            request.num_prompt_tokens,
            num_known,
            request.max_tokens + num_after,
            # Nothing stands between an answer and what follows it.
            1 if num_after else self.spec.block_length(arguments.settings),
        )
        return self.spec.layout.width(answer)

    def _num_sampled(self, request: Request, num_canvas: int) -> int:
        """Return how many of a request's canvas rows are projected onto the vocabulary."""
        arguments, layout = arguments_of(request.sampling_params), self.spec.layout
        num_answer = max(num_canvas - layout.num_after(len(arguments.suffix)), 0)
        block_length = self.spec.block_length(arguments.settings)
        numbers = num_answer, request.num_prompt_tokens, block_length
        return int(layout.num_sampled(*map(np.asarray, numbers)))

    # A request arrives.

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.seed is None:
            # Each tensor-parallel rank draws the canvases from this seed. Several answers to one
            # prompt may share their parameters, so these are copied.
            request.sampling_params = copy.copy(params)
            request.sampling_params.seed = int(self._seeds.integers(2**63))
        if arguments_of(params).read_only:
            # The one canvas that is read may begin with the end of the prompt.
            num_read = self.spec.length - self.spec.num_given(request.num_prompt_tokens)
            request.max_tokens = min(request.max_tokens, num_read)
        if self.spec.layout.keeps_emitted:
            # Its canvas has no more than the model's length has room for.
            num_left = self.spec.room(request.num_prompt_tokens)
            request.max_tokens = min(request.max_tokens, num_left)
        if request.lora_request is not None:
            request.lora_request = AdapterLoad.of(request.lora_request)
        if self._prefix_hashes is not None:
            self._prefix_hashes.install(request)
        super().add_request(request)
        for feature in self._features:
            feature.add_request(request)

    # A pass is scheduled.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._leaves_waiting:
            self.constraints.make_room()
        # Where there is room for all, the order decides nothing.
        is_crowded = bool(self.waiting) or self._num_rows_left < self.spec.length
        if is_crowded and isinstance(self.waiting, Turns):
            self.waiting.take_turns(self)
        self._num_rows_left, self._num_added = self.max_num_scheduled_tokens, {}
        self._lacking_pictures.clear()
        output = super().schedule(throttle_prefills)
        if self._lacking_pictures:
            self._release_pictures(self._lacking_pictures[0])
        self._leaves_waiting = bool(self.waiting)
        return output

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the number of rows that a request runs: the last step before blocks are allocated.

        A slice of a canvas would be denoised as if the rest did not exist, so a canvas runs whole
        or waits for a pass with room. The stock scheduler does not count the canvas after the end
        of a prompt, so the budget is kept here as well.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        rows = self.spec.layout.rows(self._rows_of(request, num_computed_tokens, num_new_tokens))
        if (
            request.has_encoder_inputs
            and rows.num_rows == 0
            and num_computed_tokens < request.num_prompt_tokens
            and self._num_rows_left >= self.spec.length
        ):
            self._lacking_pictures.append(request)
        if rows.num_added:
            self._num_added[request.request_id] = rows.num_added
        self._num_rows_left -= rows.num_rows
        return rows.num_rows

    def _release_pictures(self, first: Request) -> None:
        """Let the encoder's cache evict what other requests hold in it.

        If a block ends within a picture, its request holds that picture while it may wait for the
        next one of the block. Several such requests would wait for one another for ever. What is
        evicted is encoded again for the block that needs it.

        Args:
            first: Request that the next pass gives room.
        """
        for request in self.requests.values():
            if request is not first and request.has_encoder_inputs:
                self.encoder_cache_manager.free(request)

    def _rows_of(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> ScheduledRequest:
        """Describe a request for its layout of canvases."""
        # Tokens of the prompt or an emitted canvas; a pass in flight is assumed to emit its canvas.
        num_uncomputed = request.num_tokens + request.num_output_placeholders - num_computed_tokens
        is_at_prompt = not request.spec_token_ids
        width = self._canvas_width(request, request.num_tokens)
        is_free = is_at_prompt or self.spec.layout.recomputes
        # If loaded blocks turn out to be missing, the pass is repeated; a canvas's step cannot be.
        may_be_repeated = (
            self.connector is not None
            and self.recompute_kv_load_failures
            and request.status != RequestStatus.RUNNING
            and num_computed_tokens > 0
        )
        order = self._order_of(request)
        return ScheduledRequest(
            num_prompt=request.num_prompt_tokens,
            num_tokens=request.num_tokens,
            num_computed=num_computed_tokens,
            num_uncomputed=max(num_uncomputed, 0),
            num_granted=num_new_tokens,
            num_left=self._num_rows_left,
            max_model_len=self.max_model_len,
            next_width=self._canvas_width(request, request.num_tokens + width),
            canvas_width=width if is_free else min(len(request.spec_token_ids), width),
            is_at_prompt=is_at_prompt,
            narrows_later=request.num_output_placeholders > 0,
            shares_prompt=order.prompt_with_step and not may_be_repeated,
            shares_encode=order.encode_with_step,
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        awaits_output = self.constraints.awaits_output(scheduler_output)
        # Rows of canvases after a prompt, and of blocks, with the known tokens among them.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in self._num_added.keys() & scheduler_output.num_scheduled_tokens.keys():
            drafts[request_id] = [-1] * self._num_added[request_id]
        super()._update_after_schedule(scheduler_output)
        # The stock code sets this for grammars only.
        scheduler_output.pending_structured_output_tokens |= awaits_output

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Do nothing: canvases are not the workers' but the scheduler's own."""

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Do nothing: the canvases that a constraint reads come with the output of their pass."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        return self.constraints.message(scheduler_output)

    # A pass returns.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        for part in self._parts(scheduler_output, model_runner_output):
            for feature in self._features:
                feature.observe(part)
            self._counters.observe(part.request, part.counts, part.max_steps)
        self.prompt_logprobs.hold(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for feature in self._features:
            feature.finish_pass(outputs)
        return outputs

    def _parts(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Iterator[ReturnedPart]:
        """Yield each request's part of a pass, before the stock code finishes any of them."""
        emitted = model_runner_output.sampled_token_ids or []
        views = model_runner_output.aux_output_connector_output or {}
        for request_id, num_rows in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            arguments = arguments_of(request.sampling_params)
            canvas = scheduler_output.scheduled_spec_decode_tokens.get(request_id) or ()
            index = model_runner_output.req_id_to_index[request_id]
            num_emitted = len(emitted[index]) if emitted else 0
            # A pass that was in flight when its request was preempted is not a step of a canvas;
            # the tokens that it emits count all the same.
            is_stale = request.num_stale_output_tokens > 0
            is_lost = is_stale and (num_emitted == 0 or request.drop_stale_output)
            num_denoised = len(canvas)
            is_commit = (
                num_emitted > 0
                and self._order_of(request).commit_encodes
                and not arguments.read_only
            )
            # Nor is one that was scheduled before its block was emitted.
            if is_commit or num_denoised <= self.spec.num_given(request.num_tokens):
                num_denoised = 0
            yield ReturnedPart(
                request,
                RowCounts(
                    num_rows - num_denoised,
                    num_denoised,
                    self._num_sampled(request, len(canvas)),
                    num_emitted,
                ),
                None if is_lost or request_id not in views else CanvasView(views[request_id]),
                arguments.step_cap(self.spec),
                self.constraints.num_settled(request_id),
                is_stale,
                is_lost,
            )

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append emitted tokens, and correct the count of computed tokens.

        vLLM calls this before it registers computed blocks for the prefix cache.
        """
        # The step that emitted them ran canvas rows, so none of them is encoded yet.
        num_encoded = request.num_computed_tokens - len(new_token_ids)
        commits = self._order_of(request).commits
        if commits and not is_stale:
            # Given tokens at the start of the canvas are computed too, but not emitted.
            request.num_computed_tokens += self.spec.num_given(request.num_tokens)
        result = super()._update_request_with_output(request, new_token_ids, is_stale)
        if not (commits or is_stale):
            request.num_computed_tokens = num_encoded
        return result

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        stats = super().make_stats(spec_decoding_stats, *args, **kwargs)
        if stats is not None:
            stats.spec_decoding_stats = self._counters.attach(
                stats.spec_decoding_stats, self.num_spec_tokens
            )
        return stats

    # A request leaves.

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._counters.forget(request.request_id)
        for feature in self._features:
            feature.preempt_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._counters.forget(request.request_id)
        for feature in self._features:
            feature.remove_request(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # Blocks of the cache move to the CPU's memory and back (--kv-offloading-size).

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        super()._update_waiting_for_remote_kv(request)
        # Stock would compute the last token again, which begins no block.
        request.num_computed_tokens -= self.spec.num_given(request.num_computed_tokens)

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Offer final keys and values alone: by computed tokens, and by blocks that have a hash.

        The rows of a canvas in flight are noise, and so are those of an answer's last canvas that
        is not encoded.
        """
        if self.connector is not None:
            num_final = request.num_computed_tokens - request.num_in_flight_tokens
            request.num_computed_tokens = max(0, min(num_final, request.num_tokens))
            del request.block_hashes[request.num_computed_tokens // self.hash_block_size :]
        return super()._connector_finished(request)


class CanvasScheduler(CanvasScheduling, DiffusionScheduler):
    """Synchronous scheduler: each pass is scheduled with the last one's result.

    A canvas is emitted in the step that converges. If the request goes on, its tokens are known but
    not computed, and are encoded like a prompt; the last canvas never.
    If the rule's last pass leaves final keys and values, that pass emits the canvas.
    """

    is_async = False

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # A canvas may follow the tokens that are computed now.
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * self._canvas_width(request, request.num_tokens)
        return outputs


class AsyncCanvasScheduler(CanvasScheduling, DiffusionAsyncScheduler):
    """Asynchronous scheduler: the next pass is scheduled while this one runs.

    The step that converges is not known in time, so the next pass over the same rows encodes the
    canvas and emits it, the last one too. A whole sequence has nothing to encode: there the step
    that decides a block emits it, and the next pass, of the same rows, goes on with the block after
    it.
    """

    is_async = True

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # The stock code holds back a request whose pass in flight will emit its last two tokens. A
        # pass of a canvas may emit none, and a constraint needs the next pass.
        constrained = [
            request for request in self.running if self.constraints.holds(request.request_id)
        ]
        for request in constrained:
            request.max_tokens += _TOKENS_IN_FLIGHT
        try:
            with self._computing_anew():
                return super().schedule(throttle_prefills)
        finally:
            for request in constrained:
                request.max_tokens -= _TOKENS_IN_FLIGHT

    @contextmanager
    def _computing_anew(self) -> Iterator[None]:
        """While a pass is scheduled that begins at position 0 again, as each does over a whole
        sequence.

        The stock code takes the rows in flight for computed, and would give memory to as many more.
        """
        in_flight = [
            # What is stale was forgotten when the request was preempted.
            (
                request,
                request.num_in_flight_tokens - request.num_stale_output_tokens,
                request.num_stale_output_tokens,
            )
            for request in self.running
            if self.spec.layout.recomputes
        ]
        for request, num_rows, _ in in_flight:
            request.num_computed_tokens -= num_rows
            request.num_output_placeholders -= num_rows
        yield
        for request, num_rows, num_stale in in_flight:
            # So were these, if it was preempted meanwhile.
            if request.num_stale_output_tokens == num_stale:
                request.num_computed_tokens += num_rows
                request.num_output_placeholders += num_rows


def source_of_seeds(vllm_config: VllmConfig) -> np.random.Generator:
    """Return the generator of the seeds of an engine's requests that have none.

    By default it differs in every engine and after every start, so that equal requests get
    different answers. A server's own ``--seed`` makes it repeat from start to start, and then the
    index of a data-parallel engine makes it differ from that of the others, as in vLLM's
    ``set_random_seed``. Engines of an external launcher each schedule the same requests, one for
    each rank of one model, so theirs are alike.
    """
    seed, parallel = vllm_config.model_config.seed, vllm_config.parallel_config
    if seed == _UNSET_SEED and parallel.distributed_executor_backend != "external_launcher":
        return np.random.default_rng()
    return np.random.default_rng((seed, parallel.data_parallel_index))


def canvas_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Make the scheduler of a diffusion model for the order that vLLM has decided on.

    In autoregressive mode it is vLLM's scheduler with our grammars.
    """
    is_async = vllm_config.scheduler_config.async_scheduling
    end_with_threads()
    if not vllm_config.model_config.is_diffusion:
        scheduler = (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **kwargs)
        OrdinaryGrammars.of(scheduler.structured_output_manager)
        return scheduler
    scheduler_cls = AsyncCanvasScheduler if is_async else CanvasScheduler
    return scheduler_cls(vllm_config=vllm_config, **kwargs)
