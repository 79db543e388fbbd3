"""Changes to vLLM's engine process for the schedulers of this package."""

from __future__ import annotations

import functools
import logging
import threading
import traceback
from typing import Any

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


def _engine_of(error_traceback: Any) -> Any:
    """Return the engine whose thread an exception has ended; ``None`` for another thread."""
    from vllm.v1.engine.core import EngineCoreProc

    for frame, _ in traceback.walk_tb(error_traceback):
        engine = frame.f_locals.get("self")
        is_thread = any(path.endswith("." + frame.f_code.co_name) for path in _THREADS)
        if is_thread and isinstance(engine, EngineCoreProc):
            return engine
    return None


def ask_for_no_drafts() -> None:
    """Keep the synchronous loop from asking workers for drafts of canvases. This is safe to call twice.

    It asks the workers for draft tokens after each pass, and waits for the answer: with pipeline stages
    no pass would begin before the last one has ended. A canvas scheduler needs no drafts. Every
    process calls this, also one without an engine: Ray's actors have the methods that their class
    has in the process that makes the actor.
    """
    _not_asking.install()


@replaces_call(
    "vllm.v1.engine.core:EngineCore.post_step",
    reason="Stock waits for draft tokens after each pass; a canvas scheduler needs none.",
    until="A scheduler can say that it takes no drafts from the workers.",
)
def _not_asking(stock: Any, self: Any, model_executed: bool) -> None:
    if getattr(self.scheduler, "takes_drafts", True):
        stock(self, model_executed)
