"""Settings that must be in place before anything imports torch or vLLM, and shared fixtures."""

import atexit
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from vllm_diffusion.startup.environment import compile_once

# Dozens of processes import vLLM here.
compile_once()

# What tests import stays: Python's collector need not walk through it, again and again, nor at the
# end.
gc.disable()
atexit.register(gc.freeze)

# The engine runs in the test's process, where its state can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two threads on two busy cores wait for one another; these matrices are too small to share.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# Only now, since it reads OMP_NUM_THREADS.
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Read when Triton is imported: its kernels run under its CPU interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts what it runs in the background with interrupts ignored, and children inherit that;
# the tests of an interrupted demo send one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example on a busy machine means nothing. A change is refused for what it broke, and
# not for what a new example found; everybody's own runs look for those.
hypothesis.settings.register_profile("noisy machine", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("noisy machine")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude the objects that exist by now from garbage collection; tests' own are collected."""
    gc.freeze()
    # Python's default, a walk every 700 objects, took most of the time of tests that read much.
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def log_lines_are_kept() -> Iterator[None]:
    """Undo that a command in a test's process disables the log lines of later tests."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def vllm_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Collect what vLLM and this package log at the level of information and above, in order."""
    # Its set-up, on import, resets the loggers that are there, and keeps records from the root.
    import vllm.logger  # noqa: F401

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    return caplog


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run one ``vllm serve`` process for every test that requests it."""
    from tests.support.engines.server import shared_server

    with shared_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return random weights, as Hugging Face's classes save them."""
    from tests.support.models.checkpoints import random_checkpoint

    return random_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Any:
    """Return Hugging Face's own generation from ``checkpoint``, which no test changes."""
    from tests.support.oracles.oracle import Oracle

    return Oracle(checkpoint)
