"""Growth of a server's counters between two looks at its ``/metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_diffusion.cli.client import ANSWERED, totals
from vllm_diffusion.drafting.accepted import Verifications

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# Counters of a draft model, and of ``linear_spec``: a server has one of the two.
_VERIFIED = ("vllm:spec_decode_num_drafts_total", "vllm_diffusion:verifications_total")
_KEPT = (
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm_diffusion:kept_tokens_per_position_total",
)
_PASSES = "vllm_diffusion:passes_total"


@dataclass(frozen=True)
class Growth:
    """Growth of a server's counters while it answered.

    Attributes:
        requests: Answered requests.
        tokens: Tokens of the answers.
        first_token_seconds: Seconds from each request to its first token, summed.
        verifications: Verified drafts.
        passes: Passes of requests, those over prompts among them. A server that vLLM alone serves
            does not count them: one for each token, which holds without a draft.
        rows: Rows of these passes but for the prompts', likewise.
    """

    requests: float = 0.0
    tokens: float = 0.0
    first_token_seconds: float = 0.0
    verifications: Verifications = Verifications()
    passes: float = 0.0
    rows: float = 0.0

    @classmethod
    def between(cls, before: Sequence[Sample], after: Sequence[Sample]) -> Growth:
        """Subtract one look at the counters from a later one."""
        was, now = totals(before), totals(after)
        kept_before, kept = (
            totals((each for each in samples if each.name in _KEPT), "position")
            for samples in (before, after)
        )
        places = sorted(kept, key=int)

        def grown(*names: str) -> float:
            return sum(now.get(name, 0.0) - was.get(name, 0.0) for name in names)

        requests, tokens = grown(ANSWERED), grown("vllm:generation_tokens_total")
        # The pass over the prompt gives the first token, and the last one is in no pass.
        passes, rows = tokens, tokens - requests
        if _PASSES in now:
            passes = grown(_PASSES)
            rows = grown("vllm_diffusion:encode_rows_total", "vllm_diffusion:canvas_rows_total")
            rows -= grown("vllm:prompt_tokens_total")
        return cls(
            requests,
            tokens,
            grown("vllm:time_to_first_token_seconds_sum"),
            Verifications(
                int(grown(*_VERIFIED)),
                tuple(int(kept[at] - kept_before.get(at, 0.0)) for at in places),
            ),
            passes,
            rows,
        )
