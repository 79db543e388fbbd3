"""vLLM's schedulers, drafting as many tokens as pay: one number for all requests of a step."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_diffusion.drafting.adaptive import AdaptiveDraft


class AdaptiveDraftsMixin(Scheduler):
    """Answers vLLM's question of how many tokens to draft for a number of requests.

    vLLM has a table for it, by which it captures CUDA graphs. The levels are those of the table, so that
    each has its graphs; which one a step has is what :class:`AdaptiveDraft` chooses.
    """

    dynamic_sd_lookup: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The table, and not what vLLM makes of it for as many requests as there may be.
        table = self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        levels = {min(level, self.num_spec_tokens) for _, _, level in table if level > 0}
        self.draft = AdaptiveDraft(tuple(levels))
        # Of each step under way: when it was scheduled, and its requests' mean tokens.
        self._steps: deque[tuple[SchedulerOutput, float, float]] = deque()
        self._last_update = 0.0
        self._accepted: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's, with the level that was chosen for requests as many as these."""
        start = time.perf_counter()
        running = self.running
        mean_tokens = sum(request.num_tokens for request in running) / max(len(running), 1)
        level = self.draft.choose([request.request_id for request in running], mean_tokens)
        self.dynamic_sd_lookup = [level] * len(self.dynamic_sd_lookup)
        output = super().schedule(*args, **kwargs)
        self._steps.append((output, start, mean_tokens))
        return output

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's, which is asked before weights are replaced: what the old ones drafted is no guide."""
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        if is_reset:
            self.draft.forget_acceptance()
        return is_reset

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which asks once for each request that had drafts verified."""
        self._accepted[kwargs["request_id"]] = kwargs["num_accepted_tokens"]
        return super().make_spec_decoding_stats(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        """As vLLM's, and take in what the step accepted and cost."""
        self._accepted = {}
        outputs = super().update_from_output(scheduler_output, *args)
        now = time.perf_counter()
        while self._steps:
            output, start, mean_tokens = self._steps.popleft()
            if output is scheduler_output:
                # Steps overlap where scheduling is asynchronous: one costs what lies between two ends.
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
