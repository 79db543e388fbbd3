"""What a server says of its draft, from what verifications keep."""

from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting import kept_tokens
from vllm_diffusion.metrics import DiffusionStatLogger

pytestmark = pytest.mark.engine


def drafted(method: str | None) -> Any:
    draft = {"model": str(shipped_draft())} if method == "dflash" else {}
    return vllm_config(
        shipped_checkpoint("qwen3"),
        served_model_name=f"target {method}",
        speculative_config=method and {"method": method, "num_speculative_tokens": 7, **draft},
    )


def observe(stat_logger: DiffusionStatLogger, verifications: int, kept: int) -> None:
    """Count verifications of eight tokens each, in one step, of which ``kept`` were kept."""
    stats = SpecDecodingStats.new(8)
    for number in range(verifications):
        stats.observe_draft(num_draft_tokens=8, num_accepted_tokens=int(number < kept))
    stat_logger.record(SchedulerStats(spec_decoding_stats=stats), None)


def keeps_nothing(method: str) -> float | None:
    labels = {"model_name": f"target {method}", "engine": "0"}
    return REGISTRY.get_sample_value("vllm_diffusion:draft_keeps_nothing", labels)


def test_draft_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that keeps under 2 % of 200 verifications is warned of once and has a metric."""
    warnings: list[str] = []
    monkeypatch.setattr(
        kept_tokens.logger, "warning", lambda text, *args: warnings.append(text % args)
    )
    served = DiffusionStatLogger(drafted("dflash"))
    observe(served, 199, 31)
    assert (keeps_nothing("dflash"), warnings) == (None, [])
    observe(served, 1, 0)
    assert keeps_nothing("dflash") == 1
    (warning,) = warnings
    assert f"{shipped_draft()} only costs time: 200 verifications kept 31 of its 1600" in warning
    assert all(cause in warning for cause in ("template", "layers", "fc", "another target"))
    observe(served, 200, 32)
    assert keeps_nothing("dflash") == 0
    observe(served, 200, 0)
    assert (keeps_nothing("dflash"), len(warnings)) == (1, 1)


def test_drafts_that_may_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that looks drafts up, or the lack of one, causes no warning and no metric."""
    monkeypatch.setattr(kept_tokens.logger, "warning", lambda *args: pytest.fail(str(args)))
    observe(DiffusionStatLogger(drafted("ngram")), 300, 0)
    observe(DiffusionStatLogger(drafted(None)), 300, 0)
    assert keeps_nothing("ngram") is keeps_nothing("None") is None


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Collect what is logged of drafts, each with its level."""
    lines: list[tuple[str, str]] = []
    for level in ("info", "warning"):

        def log(text: str, *args: object, level: str = level) -> None:
            lines.append((level, text % args))

        monkeypatch.setattr(kept_tokens.logger, level, log)
    return lines


def verified(model: str, drafted: int, kept: int, number: int = 2000) -> None:
    """Verify drafts of ``drafted`` tokens, of which ``kept`` are kept in all, in steps of 16."""
    watch = kept_tokens.KeptTokens("org/target", model, ("verified", "0"))
    for first in range(0, number, 16):
        stats = SpecDecodingStats.new(drafted)
        for at in range(first, min(first + 16, number)):
            accepted = kept * (at + 1) // number - kept * at // number
            stats.observe_draft(num_draft_tokens=drafted, num_accepted_tokens=accepted)
        watch.observe(stats)


# The lowest figure of its card is 4.10 tokens: 0.8 of it are 3.28, and 4560 kept tokens.
MEAN = " tokens a verification, the mean of 2000"
KNOWN = "incoai/Qwen3.8-27B-DFlash2"
OF_CARD = (
    "; its publisher gives GSM8K 5.46, MATH-500 5.28, HumanEval 4.39, MBPP 4.79, MT-Bench 4.10 "
)


@pytest.mark.parametrize(
    ("model", "drafted", "kept", "level", "said"),
    [
        pytest.param(KNOWN, 7, 6200, "info", f"4.10{MEAN}{OF_CARD}", id="as much"),
        pytest.param(KNOWN, 7, 4560, "info", f"3.28{MEAN}{OF_CARD}", id="hardly less"),
        pytest.param(KNOWN, 7, 4559, "warning", "bench-drafts org/target --draft inco", id="less"),
        pytest.param(KNOWN, 5, 4559, "info", f"3.28{MEAN}.", id="shorter drafts"),
        pytest.param("mine/draft", 7, 4559, "info", f"3.28{MEAN}.", id="unknown"),
    ],
)
def test_kept_tokens_beside_the_card(
    model: str, drafted: int, kept: int, level: str, said: str, logged: list[tuple[str, str]]
) -> None:
    """After 2,000 verifications one line has the mean, beside the publisher's figures if drafts are
    as long as theirs; it is a warning that names a command if the mean is clearly lower.
    """
    verified(model, drafted, kept, 1999)
    assert logged == []
    verified(model, drafted, kept)
    ((given, line),) = logged
    assert given == level
    assert said in line
    assert (OF_CARD in line) == (model == KNOWN and drafted == 7)
    assert line.startswith(f"The draft {model} gives ")


def test_kept_tokens_are_logged_once(logged: list[tuple[str, str]]) -> None:
    """The statistics of a server with a draft lead to one line, and later ones to none."""
    served = DiffusionStatLogger(drafted("dflash"))
    for _ in range(3):
        observe(served, 6000, 6000)
    assert logged == [
        ("info", f"The draft {shipped_draft()} gives 2.00 tokens a verification, the mean of 6000.")
    ]
