"""Scheduler of an autoregressive target: vLLM's, with the features that its settings ask for.

These are the number of drafted tokens, which is the same for all requests of a step, and the
recording of finished requests.
"""

import time
from collections import deque
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.drafting.adaptive import AdaptiveDraft
from vllm_diffusion.drafting.draft_settings import draft_settings
from vllm_diffusion.drafting.recording import Recorder, wants_recording
from vllm_diffusion.startup.engine_process import end_with_threads

logger = init_logger(f"vllm.{__name__}")


def draft_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler for the engine's scheduling order and draft settings."""
    settings = draft_settings(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    bases: list[type[Scheduler]] = [AsyncScheduler if is_async else Scheduler]
    if settings.adaptive:
        bases.insert(0, AdaptiveDraftsMixin)
    if settings.record is not None:
        bases.insert(0, RecordingMixin)
    cls: type[Scheduler] = type("DraftScheduler", tuple(bases), {})
    end_with_threads()
    return cls(vllm_config=vllm_config, **kwargs)


class AdaptiveDraftsMixin(Scheduler):
    """Choice of the number of drafted tokens, in place of vLLM's table by batch size.

    vLLM captures CUDA graphs for the levels of its table. Only these levels are used, so that each
    has its graphs; :class:`AdaptiveDraft` chooses one for each step.
    """

    dynamic_sd_lookup: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The levels of the table itself, not of the lookup by batch size that vLLM derives from it.
        table = self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        levels = {min(level, self.num_spec_tokens) for _, _, level in table if level > 0}
        self.draft = AdaptiveDraft(tuple(levels))
        # Each step in flight, the time at which it was scheduled, and its requests' mean tokens.
        self._steps: deque[tuple[SchedulerOutput, float, float]] = deque()
        self._last_update = 0.0
        self._accepted: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, with the level that was chosen for it."""
        start = time.perf_counter()
        running = self.running
        mean_tokens = sum(request.num_tokens for request in running) / max(len(running), 1)
        level = self.draft.choose([request.request_id for request in running], mean_tokens)
        self.dynamic_sd_lookup = [level] * len(self.dynamic_sd_lookup)
        output = super().schedule(*args, **kwargs)
        self._steps.append((output, start, mean_tokens))
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset vLLM's prefix cache and the measured acceptance, which new weights make stale."""
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        if is_reset:
            self.draft.forget_acceptance()
        return is_reset

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Note the accepted tokens of a request; vLLM calls this once per request with a draft."""
        self._accepted[kwargs["request_id"]] = kwargs["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        """Update requests as vLLM does, and record what the step accepted and cost."""
        self._accepted = {}
        outputs = super().update_from_output(scheduler_output, *args)
        now = time.perf_counter()
        while self._steps:
            output, start, mean_tokens = self._steps.popleft()
            if output is scheduler_output:
                # Asynchronous steps overlap: a step's cost is the time between two ends.
                self._observe(output, mean_tokens, now - max(start, self._last_update))
                break
        self._last_update = now
        return outputs

    def _observe(self, output: SchedulerOutput, mean_tokens: float, seconds: float) -> None:
        counts, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        only_decodes = not output.scheduled_new_reqs and all(
            count == 1 + len(drafts.get(request, ())) for request, count in counts.items()
        )
        if not counts or not only_decodes:
            return
        verified = max(map(len, drafts.values()), default=0)
        drafted = output.num_spec_tokens_to_schedule
        self.draft.observe(verified, drafted, len(counts), mean_tokens, seconds, self._accepted)


class RecordingMixin(Scheduler):
    """Recording of each finished request that may be recorded and can be replayed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = draft_settings(self.vllm_config).record
        assert settings is not None
        index = self.vllm_config.parallel_config.data_parallel_index
        self.recorder = Recorder(settings.ring(index), logger.warning)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Record a request, then free it as vLLM does.

        vLLM calls this once for each request: finished, aborted, or ended by a stop string, which
        is an abort here. The answer of an aborted request is the target's own too.
        """
        if _is_recordable(request):
            self.recorder.add(request.prompt_token_ids, list(request.output_token_ids))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Write pending exchanges, then shut down as vLLM does."""
        self.recorder.close()
        super().shutdown()


def _is_recordable(request: Request) -> bool:
    """Return true if the target read a request's token ids and nothing else."""
    params = request.sampling_params
    return bool(
        params is not None
        and request.num_output_tokens
        and request.prompt_token_ids
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and not request.resumable
        and wants_recording(params.extra_args)
    )
