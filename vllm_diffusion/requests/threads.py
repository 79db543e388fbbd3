"""Threads for work that may have to be left."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextvars import copy_context
from typing import Any

# llguidance goes down a chain of references in its own stack: the longest that 6,000 objects make
# needs between 16 and 32 MB, where a thread's usual 8 MB end the process.
STACK_BYTES = 128 * 2**20
# `threading.stack_size` is the whole process's.
_stack_size = threading.Lock()


def deep_thread(work: Callable[..., Any], name: str, *args: Any) -> threading.Thread:
    """Start a thread whose stack holds what llguidance needs; no process waits for it to end."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    with _stack_size:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread


class LeavableThreads(Executor):
    """An executor with deep stacks that neither the end of the process nor :meth:`shutdown` waits
    for.

    The threads of ``concurrent.futures`` are waited for at exit, however long their work takes.
    """

    def __init__(self, count: int, name: str, most_seconds: float | None = None) -> None:
        """Start threads.

        Args:
            count: Number of calls that run at a time.
            name: Beginning of the threads' names.
            most_seconds: Seconds after which a call fails with ``TimeoutError``. Its thread works
                on, and the next call gets another one.
        """
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._name = name
        self._most_seconds = most_seconds
        for i in range(count):
            threading.Thread(target=self._serve, name=f"{name}_{i}", daemon=True).start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        # What is said about a call names the fields of the request that it is for.
        context = copy_context()
        self._jobs.put((future, lambda: context.run(call, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Forget the calls that have not begun, and end the threads that have none."""
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0].cancel()
        self._jobs.put(None)

    def _serve(self) -> None:
        while job := self._jobs.get():
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            thread = deep_thread(_settle, f"{self._name}_call", future, call)
            thread.join(self._most_seconds)
            if thread.is_alive():
                reason = (
                    f"the {self._name} takes more than {self._most_seconds:g} s; make it simpler"
                )
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(TimeoutError(reason))
            # Else a call would be kept until the next one comes.
            del job, future, call, thread
        # For the next thread.
        self._jobs.put(None)


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give a future the outcome of a call, unless somebody has given it up."""
    with contextlib.suppress(InvalidStateError):
        try:
            outcome = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)
