"""How the engine's process ends, and what its command prints then.

vLLM's command does not learn why a process of its engine ended. Such a process leaves its refusal
in a file, and the command prints it as one line, after what vLLM prints of it.
"""

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from vllm_diffusion.hooks.replacement import replaces_call

logger = logging.getLogger("vllm.vllm_diffusion")

# The functions of an engine's threads: one receives requests, the other sends outputs.
_THREADS = (
    "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
    "vllm.v1.engine.core:EngineCoreProc.process_output_sockets",
)


@functools.cache
def end_with_threads() -> None:
    """End an engine of this process when its input or output thread ends with an error.

    vLLM's engine would run on without the thread, answer no request, and log nothing. Our
    schedulers call this, since an engine makes its scheduler before the threads.
    """
    usual = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        usual(args)
        if (engine := _engine_of(args.exc_traceback)) is None:
            return
        from vllm.v1.engine import EngineCoreRequestType

        logger.error(
            "The engine can no longer exchange messages with the API process, so it ends (%s: %s).",
            args.exc_type.__name__,
            args.exc_value,
        )
        # What vLLM's executor sends to the engine's main loop when a worker has died.
        engine.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))

    threading.excepthook = excepthook
    _not_collecting.install()


@replaces_call(
    "vllm.v1.engine.core:cleanup_dist_env_and_memory",
    reason="It looks for garbage among all objects of a process that ends, as Python does after it, for seconds.",
    until="EngineCore.shutdown leaves its objects frozen on every platform, as it does on ROCm.",
)
def _not_collecting(stock: Any, *args: Any, **kwargs: Any) -> None:
    # An engine in the user's own process gives its memory back.
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        stock(*args, **kwargs)
        return
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    gc.freeze()
    destroy_model_parallel()
    destroy_distributed_environment()


def end_quietly() -> None:
    """Let a server end its engine without an error: none in its log, and a 503 for requests that
    come late.

    This is safe to call twice.
    """
    _ending_quietly.install()


@replaces_call(
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown",
    reason="It stops the reader of outputs after their socket; a faster reader logs that the engine died.",
    until="AsyncLLM.shutdown cancels its output handler before it closes the client's sockets.",
)
def _ending_quietly(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    client = getattr(self, "engine_core", None)
    if client is not None and not client.resources.engine_dead:
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_is_no_dead_engine)
    # vLLM shuts down an engine that was not made completely, too.
    if renderer := getattr(self, "renderer", None):
        for executor in (renderer._executor, renderer._mm_executor):
            executor.submit = _refuse_when_stopping
    stock(self, *args, **kwargs)


def _refuse_when_stopping(*_: Any) -> NoReturn:
    """Answer 503 to a request that comes while the server is being stopped.

    vLLM prepares a prompt in threads that it ends before anything else; the ended ones raise an
    error of Python's, which would be a 500 with a trace in the log.
    """
    from vllm.exceptions import RetryableRequestError

    raise RetryableRequestError("The server is shutting down; send the request again later.")


def _is_no_dead_engine(record: logging.LogRecord) -> bool:
    """Pass every log line but one about an engine that is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, EngineDeadError)


def _engine_of(error_traceback: Any) -> Any:
    """Return the engine whose thread an exception has ended; ``None`` for another thread."""
    from vllm.v1.engine.core import EngineCoreProc

    for frame, _ in traceback.walk_tb(error_traceback):
        engine = frame.f_locals.get("self")
        is_thread = any(path.endswith("." + frame.f_code.co_name) for path in _THREADS)
        if is_thread and isinstance(engine, EngineCoreProc):
            return engine
    return None


_PACKAGE = __name__.partition(".")[0]
# Only vLLM's own commands import it. A script that uses ``vllm.LLM`` keeps Python's trace.
_COMMAND = "vllm.entrypoints.common.cli_args"
# Others put hooks of theirs around this process's, which CuTe's DSL does as soon as it is imported.
_is_installed = False


def refusal_in(error: BaseException) -> str | None:
    """Return the message of a refusal of this package; ``None`` for every other exception.

    A refusal is a ``ValueError`` that code of this package raised. vLLM's configuration consists of
    pydantic classes, which wrap it in a ``ValidationError``.
    """
    import pydantic

    errors: list[object] = [error]
    if isinstance(error, pydantic.ValidationError):
        details = error.errors(include_url=False, include_input=False)
        errors = [detail.get("ctx", {}).get("error") for detail in details]
    for one in errors:
        if type(one) is ValueError:
            modules = [
                str(frame.f_globals.get("__name__", ""))
                for frame, _ in traceback.walk_tb(one.__traceback__)
            ]
            if modules and modules[-1].partition(".")[0] == _PACKAGE:
                return str(one)
    return None


def refusal_path() -> Path | None:
    """Return the file where processes of the engine leave a refusal, if this process would print
    it.
    """
    if not _is_installed:
        return None
    path = _path()
    # Another process had this one's number.
    with contextlib.suppress(OSError):
        path.unlink()
    return path


def leave(path: Path | None, refusal: str) -> None:
    """Leave a refusal for the command that started this process of the engine, on the same machine.

    vLLM's log lines about the exception that follows have no trace then, nor what Python prints of
    a child process that ends with it.

    Args:
        path: The plan's ``refusal_path``.
        refusal: Sentence for the operator.
    """
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(functools.partial(_without_trace, refusal))
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(refusal, encoding="utf-8")
            if multiprocessing.parent_process() is not None:
                # multiprocessing asks for it by this name, once, before the process ends.
                traceback.print_exc = _print_where_the_refusal_is


def _print_where_the_refusal_is(*args: Any, **kwargs: Any) -> None:
    print(
        "The server does not start; the last line of the command's output says why.",
        file=sys.stderr,
    )


@contextlib.contextmanager
def leaving(path: Path | None) -> Iterator[None]:
    """Leave what this package refuses in the block, where a worker starts.

    Args:
        path: The plan's ``refusal_path``.
    """
    try:
        yield
    except Exception as error:
        if (refusal := refusal_in(error)) is not None:
            leave(path, refusal)
        raise


def _without_trace(refusal: str, record: logging.LogRecord) -> bool:
    """Keep a log line about a refusal without its trace; the command prints the message itself."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if error is not None and refusal in str(error):
        record.exc_info = record.exc_text = None
    return True


def _left() -> str | None:
    """Return what a process of the engine left for this one, once."""
    with contextlib.suppress(OSError):
        refusal = _path().read_text(encoding="utf-8")
        _path().unlink()
        return refusal
    return None


def _path() -> Path:
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "vllm_diffusion" / f"refusal-{os.getpid()}"


def install() -> None:
    """Print refusals of this package as one line at the end of a command of vLLM.

    All other exceptions go to the previous hook. This is safe to call twice.
    """
    global _is_installed
    if _COMMAND not in sys.modules or _is_installed:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = refusal_in(error) or _left()
        if line is None:
            previous(kind, error, trace)
        else:
            print(f"vllm-diffusion: {line}", file=sys.stderr)

    sys.excepthook = hook
    _is_installed = True
