"""Watch over what a server's verifications keep of its draft, beside what its publisher says."""

from functools import cache

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.drafting.presets import DEFAULT_BLOCK, Preset, preset_of

logger = init_logger(f"vllm.{__name__}")
# A draft that keeps less than this share of its tokens, in so many verifications, only costs time.
LEAST_KEPT, VERIFICATIONS = 0.02, 200
# The mean of so many is logged. Among them are hundreds of requests, or a few long answers.
REPORTED_AFTER = 2000
# Less than this share of the lowest figure of a draft's card has a cause other than the text.
CLEARLY_LOWER = 0.8
# Drafts that are this much shorter than the card's, in the mean, cannot keep as many tokens.
_SHORTER = 0.9
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
    """Draft tokens that verifications keep: their mean is logged once, and a draft that keeps
    nothing is reported once.
    """

    def __init__(self, target: str, model: str, labels: tuple[str, str]) -> None:
        """Begin to count.

        Args:
            target: Name or path of the target.
            model: Name or path of the draft.
            labels: Labels of the metric.
        """
        self._target = target
        self._model = model
        self._labels = labels
        # Verifications, tokens that were drafted for them, and those that they kept.
        self._latest = (0, 0, 0)
        self._first = (0, 0, 0)
        self._has_warned = False

    def observe(self, stats: SpecDecodingStats) -> None:
        """Count the verifications of one step, and judge them when there are enough."""
        step = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
        self._latest = _sum(self._latest, step)
        if self._latest[0] >= VERIFICATIONS:
            self._judge(*self._latest)
            self._latest = (0, 0, 0)
        if self._first[0] < REPORTED_AFTER:
            self._first = _sum(self._first, step)
            if self._first[0] >= REPORTED_AFTER:
                self._report(*self._first)

    def _report(self, number: int, drafted: int, kept: int) -> None:
        """Log the mean of the first verifications, and what the draft's card has."""
        tokens = 1 + kept / number
        text = f"The draft {self._model} gives {tokens:.2f} tokens a verification, the mean of {number}"
        card = _comparable(preset_of(self._model), drafted / number)
        if card is not None:
            text = f"{text}; its publisher gives {card.figures}"
        if card is None or tokens >= CLEARLY_LOWER * card.least_kept:
            logger.info("%s.", text)
            return
        logger.warning(
            "%s. It is clearly less than the lowest of these: the chat template, the temperature, a quantised head, "
            "the draft's window or the version may be the cause. vllm-diffusion bench-drafts %s --draft %s --data "
            "FILE shows which, as docs/use/drafts.md describes.",
            text,
            self._target,
            self._model,
        )

    def _judge(self, number: int, drafted: int, kept: int) -> None:
        """Set the metric for the latest verifications; warn once if they kept nothing."""
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
    return KeptTokens(vllm_config.model_config.model, str(spec.model), labels)


def _sum(some: tuple[int, int, int], more: tuple[int, int, int]) -> tuple[int, int, int]:
    return some[0] + more[0], some[1] + more[1], some[2] + more[2]


def _comparable(preset: Preset | None, drafted: float) -> Preset | None:
    """Return a draft's preset if the publisher's figures are known and are of drafts that were not
    longer than these.

    Args:
        preset: Preset of the draft.
        drafted: Mean tokens of a draft. They are fewer than a block has with a lower
            ``num_speculative_tokens``, and with adaptive drafts.
    """
    if preset is None or not preset.kept:
        return None
    return preset if drafted >= _SHORTER * ((preset.block or DEFAULT_BLOCK) - 1) else None
