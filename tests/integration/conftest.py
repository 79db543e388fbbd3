"""Fixtures that several of these tests share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine
from tests.support.models.checkpoints import SHIPPED

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Some run what a benchmark measures, and benchmarks are scripts.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(scope="session", autouse=True)
def models_are_inspected_here() -> Iterator[None]:
    """Let vLLM look at a model's class in this process, not in one that imports all of it again."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patched:
        # It keeps CUDA out of this process, where there is none.
        if not torch.cuda.is_available():
            patched.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture
def start_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Collect what this package logs at start, at whatever level vLLM logs."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # At the first start of a process it resets the loggers that are there.
    configure_logging_if_needed(LoggingConfig())
    logger = logging.getLogger("vllm.vllm_diffusion")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger=logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module", params=["fused", "asynchronous"])
def order(request):
    """Choose how finished canvases are encoded and passes scheduled."""
    return request.param


@pytest.fixture(scope="module", params=["trained", pytest.param("random", marks=pytest.mark.slow)])
def weights(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    """Choose the shipped weights or random ones."""
    return SHIPPED if request.param == "trained" else checkpoint


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def engine(request: pytest.FixtureRequest) -> Iterator[TracedEngine]:
    """Start an engine of the shipped DiffusionGemma, where a module has none of its own."""
    options = {"async_scheduling": request.param, "max_num_seqs": 8, "max_logprobs": -1}
    with TracedEngine(SHIPPED, **options) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium for the modules that test the page of the live canvas."""
    from tests.support.doubles.page_browser import running_browser

    with running_browser() as running:
        yield running


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open an address in a browser of its own, and check that nothing else was fetched."""
    from tests.support.doubles.page_browser import opening_pages

    with opening_pages(browser) as open_page:
        yield open_page
