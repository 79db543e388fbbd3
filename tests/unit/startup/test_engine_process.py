"""Refusals end a command of vLLM with one line, those of its engine's processes too."""

from __future__ import annotations

import asyncio
import gc
import importlib
import io
import logging
import multiprocessing
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from vllm_diffusion.startup import engine_process


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process as a command of vLLM, whose exceptions are printed as a trace."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a trace", file=sys.stderr))
    importlib.import_module(engine_process._COMMAND)
    monkeypatch.setattr(engine_process, "_is_installed", False)
    engine_process.install()
    # CuTe's DSL does so when it is imported.
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: ours(*error))


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints whose engine did not start."""
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    sys.excepthook(RuntimeError, error, None)
    return capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_a_refusal_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed once, and not by a later process of the same number."""
    assert last_line(capsys) == "a trace\n"
    path = engine_process.refusal_path()
    engine_process.leave(path, "No kernel is right.")
    assert last_line(capsys) == "vllm-diffusion: No kernel is right.\n"
    assert last_line(capsys) == "a trace\n"
    engine_process.leave(path, "Of a process that is gone.")
    assert engine_process.refusal_path() == path
    assert last_line(capsys) == "a trace\n"


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("raising", "line"),
    [
        ("raise ValueError('This cannot be loaded.')", "vllm-diffusion: This cannot be loaded.\n"),
        ("raise KeyError('a defect')", "a trace\n"),
    ],
)
def test_a_refusal_of_a_worker(
    raising: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this package refuses while a worker starts is the command's last line, without a trace."""
    monkeypatch.setattr(traceback, "print_exc", traceback.print_exc)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    path = engine_process.refusal_path()
    with pytest.raises((ValueError, KeyError)), engine_process.leaving(path):
        exec(compile(raising, "<worker>", "exec"), {"__name__": "vllm_diffusion.weights"})
    assert last_line(capsys) == line
    try:
        1 // 0  # noqa: B018
    except ZeroDivisionError:
        traceback.print_exc()
    assert ("Traceback" in capsys.readouterr().err) is (line == "a trace\n")


@pytest.mark.parametrize("engine_dead", [False, True])
def test_a_server_that_ends_its_engine(engine_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs no dead engine, unless the engine died by itself."""
    from vllm.v1.engine import async_llm
    from vllm.v1.engine.exceptions import EngineDeadError

    logger, stream = logging.getLogger(async_llm.__name__), io.StringIO()
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(async_llm.AsyncLLM, "shutdown", lambda self: None)
    engine_process.end_quietly()
    engine = mock.Mock()
    engine.engine_core.resources.engine_dead = engine_dead
    async_llm.AsyncLLM.shutdown(engine)
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        for error in (EngineDeadError(), RuntimeError("something else")):
            try:
                raise error
            except Exception:
                logger.exception("AsyncLLM output_handler failed.")
    finally:
        logger.removeHandler(handler)
    assert ("EngineDeadError" in stream.getvalue()) is engine_dead
    assert "RuntimeError: something else" in stream.getvalue()


def _end_threads(engine: mock.Mock) -> None:
    """Do what vLLM's renderer does first when a server is stopped."""
    engine.renderer._executor.shutdown(wait=False)
    engine.renderer._mm_executor.shutdown(wait=False)


def test_a_request_while_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that vLLM can no longer prepare is answered with 503, which a client may send again."""
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.exceptions import RetryableRequestError
    from vllm.renderers.base import _SwappableExecutor
    from vllm.utils.async_utils import make_async
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "shutdown", _end_threads)
    engine_process.end_quietly()
    renderer = SimpleNamespace(
        _executor=_SwappableExecutor(max_workers=1), _mm_executor=ThreadPoolExecutor(1)
    )
    prepare = [make_async(len, executor=e) for e in (renderer._executor, renderer._mm_executor)]

    async def prepared(index: int) -> int:
        return await prepare[index]("a prompt")

    assert [asyncio.run(prepared(index)) for index in (0, 1)] == [8, 8]
    AsyncLLM.shutdown(mock.Mock(renderer=renderer))
    for index in (0, 1):
        with pytest.raises(RetryableRequestError, match="is being stopped") as raised:
            asyncio.run(prepared(index))
        assert create_error_response(raised.value).error.code == 503


def test_a_script_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would print what is left, so nothing is."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(engine_process, "_is_installed", False)
    assert engine_process.refusal_path() is None
    engine_process.leave(None, "No kernel is right.")
    assert not list(tmp_path.rglob("refusal-*"))


@pytest.mark.parametrize(("name", "is_frozen"), [("EngineCore_DP0", True), ("MainProcess", False)])
def test_no_garbage_is_looked_for_at_the_end(
    name: str, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine's process, which takes seconds; an engine in the user's process frees its memory."""
    from vllm.v1.engine import core

    # vLLM's unfreezes all objects.
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", gc.unfreeze)
    engine_process._not_collecting.install()
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    gc.unfreeze()
    try:
        core.cleanup_dist_env_and_memory()
        num_frozen = gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert (num_frozen > 0) is is_frozen


def test_refusal_of_a_worker_has_no_trace() -> None:
    """vLLM logs it with its trace, which says nothing; other exceptions keep theirs."""
    logger, stream = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        engine_process.leave(None, "This GPU computes wrongly.")
        for message in ("This GPU computes wrongly.", "something else"):
            try:
                raise RuntimeError(message)
            except RuntimeError:
                logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().count("EngineCore failed to start.") == 2
    assert stream.getvalue().count("Traceback") == 1
    assert "RuntimeError: something else" in stream.getvalue()
