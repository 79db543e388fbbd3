"""A refusal ends a command of vLLM with one line, also if an engine's process refused."""

import asyncio
import gc
import importlib
import io
import logging
import multiprocessing
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest

from vllm_diffusion.startup import engine_process


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turn this process into a command of vLLM, whose exceptions are printed as a trace."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a trace", file=sys.stderr))
    importlib.import_module(engine_process._COMMAND)
    monkeypatch.setattr(engine_process, "_is_installed", False)
    engine_process.install()
    # CuTe's DSL does so when it is imported.
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: ours(*error))


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints if its engine did not start."""
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    sys.excepthook(RuntimeError, error, None)
    return capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_a_refusal_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine's refusal is printed once, and not by a later process with the same number."""
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
    """A worker's refusal at start is the command's last line, without a trace."""
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


class Core:
    """An engine's client whose reader of outputs gets an error once the sockets are closed."""

    def __init__(self, error: Exception, engine_dead: bool) -> None:
        self.resources = SimpleNamespace(engine_dead=engine_dead)
        self.is_read = threading.Event()
        self._error = error
        self._is_closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def get_output_async(self) -> NoReturn:
        await self._is_closed.wait()
        raise self._error

    def shutdown(self, timeout: float | None = None) -> None:
        self._loop.call_soon_threadsafe(self._is_closed.set)
        assert self.is_read.wait(60)


@pytest.mark.parametrize(
    ("error", "engine_dead", "is_logged"),
    [
        ("EngineDeadError", False, False),
        ("EngineDeadError", True, True),
        ("RuntimeError", False, True),
    ],
)
def test_a_server_that_ends_its_engine(
    error: str,
    engine_dead: bool,
    is_logged: bool,
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: pytest.LogCaptureFixture,
) -> None:
    """A server that ends its engine logs a dead engine only if the engine died by itself.

    vLLM's own ``shutdown`` and its own reader of outputs run here, with the reader in a loop that
    is faster than the thread that stops it.
    """
    from vllm.v1.engine import async_llm
    from vllm.v1.engine.exceptions import EngineDeadError

    AsyncLLM = async_llm.AsyncLLM
    monkeypatch.setattr(logging.getLogger(async_llm.__name__), "filters", [])
    monkeypatch.setattr(async_llm, "shutdown_prometheus", lambda: None)
    monkeypatch.setattr(AsyncLLM, "shutdown", AsyncLLM.shutdown)
    engine_process.end_quietly()

    async def end() -> None:
        core = Core(
            EngineDeadError() if error == "EngineDeadError" else RuntimeError(), engine_dead
        )
        engine: Any = mock.Mock(output_handler=None, engine_core=core)
        AsyncLLM._run_output_handler(engine)
        engine.output_handler.add_done_callback(lambda _: core.is_read.set())
        await asyncio.to_thread(AsyncLLM.shutdown, engine)

    asyncio.run(end())
    logged = [record.exc_info[0].__name__ for record in vllm_log.records if record.exc_info]
    assert logged == [error] * is_logged


def _end_threads(engine: mock.Mock) -> None:
    """Do what vLLM's renderer does first when a server is stopped."""
    engine.renderer._executor.shutdown(wait=False)
    engine.renderer._mm_executor.shutdown(wait=False)


def test_a_request_while_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that a stopping server can no longer prepare gets a 503, which allows a retry."""
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
        with pytest.raises(RetryableRequestError, match="is shutting down") as raised:
            asyncio.run(prepared(index))
        assert create_error_response(raised.value).error.code == 503


def test_a_script_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a script, which would not print it, no refusal is written to a file."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(engine_process, "_is_installed", False)
    assert engine_process.refusal_path() is None
    engine_process.leave(None, "No kernel is right.")
    assert not list(tmp_path.rglob("refusal-*"))


@pytest.mark.parametrize(("name", "is_frozen"), [("EngineCore_DP0", True), ("MainProcess", False)])
def test_no_garbage_is_looked_for_at_the_end(
    name: str, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's process ends without a garbage collection; the user's process has one."""
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
    """A worker's refusal is logged without a trace, and other exceptions keep theirs."""
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
