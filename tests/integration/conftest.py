"""What several of these tests start from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import random_checkpoint
from tests.support.oracle import Oracle

# Some run what a benchmark measures, and benchmarks are scripts.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def start_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What this package says at start, at whatever level vLLM logs."""
    # Its set-up, on import, resets the loggers that are there.
    import vllm.logger  # noqa: F401

    logger = logging.getLogger("vllm.vllm_diffusion")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger=logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Random weights, as Hugging Face's classes save them."""
    return random_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def oracle(checkpoint):
    """Hugging Face's own generation from ``checkpoint``, which nobody changes."""
    return Oracle(checkpoint)


@pytest.fixture(scope="module", params=["fused", "separate", "asynchronous"])
def order(request):
    """How finished canvases are encoded and passes scheduled."""
    return request.param
