"""What a server says of its draft, from what verifications keep."""

from __future__ import annotations

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
