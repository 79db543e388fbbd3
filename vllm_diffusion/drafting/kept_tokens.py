"""Watch over what a server's verifications keep of its draft."""

from __future__ import annotations

from functools import cache

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.spec_decode.metrics import SpecDecodingStats

logger = init_logger(f"vllm.{__name__}")
# A draft that keeps less than this share of its tokens, in so many verifications, only costs time.
LEAST_KEPT, VERIFICATIONS = 0.02, 200
# Drafts that are looked up in the text have no model that could be wrong.
_LOOKED_UP = ("ngram", "ngram_gpu", "suffix")


@cache
def _keeps_nothing() -> Gauge:
    return Gauge(
        "vllm_diffusion:draft_keeps_nothing",
        f"1 if the last {VERIFICATIONS} verifications kept less than {LEAST_KEPT:.0%} of the draft's tokens.",
        ["model_name", "engine"],
        multiprocess_mode="mostrecent",
    )


class KeptTokens:
    """Share of a draft's tokens that verifications keep; a draft that keeps nothing is reported
    once.
    """

    def __init__(self, model: str, labels: tuple[str, str]) -> None:
        """Begin to count.

        Args:
            model: Name or path of the draft.
            labels: Labels of the metric.
        """
        self._model = model
        self._labels = labels
        self._counts = [0, 0, 0]
        self._has_warned = False

    def observe(self, stats: SpecDecodingStats) -> None:
        """Count the verifications of one step, and judge them when there are enough."""
        step = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
        self._counts = [total + more for total, more in zip(self._counts, step, strict=True)]
        number, drafted, kept = self._counts
        if number < VERIFICATIONS:
            return
        self._counts = [0, 0, 0]
        keeps_nothing = kept < LEAST_KEPT * drafted
        _keeps_nothing().labels(*self._labels).set(keeps_nothing)
        if keeps_nothing and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The draft %s only costs time: %d verifications kept %d of its %d tokens. It was probably "
                "trained for another target, for another chat template, or for other layers of the target "
                "(target_layer_ids); or its fc is stored unquantised and is not in the ignore list of its "
                "quantization_config. Compare it with vllm-diffusion bench-drafts, or leave "
                "--speculative-config out.",
                self._model,
                number,
                kept,
                drafted,
            )


def kept_tokens(vllm_config: VllmConfig, labels: tuple[str, str]) -> KeptTokens | None:
    """Return the count of a draft's kept tokens; ``None`` without a draft that is a model."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method in _LOOKED_UP or vllm_config.diffusion_config is not None:
        return None
    return KeptTokens(str(spec.model), labels)
