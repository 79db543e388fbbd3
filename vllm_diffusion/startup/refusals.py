"""Refusals of this package end a command of vLLM with one line instead of a stack trace."""

from __future__ import annotations

import sys
from types import TracebackType

_PACKAGE = __name__.partition(".")[0]
# Only vLLM's own commands import it. A script that uses ``vllm.LLM`` keeps Python's trace.
_COMMAND = "vllm.entrypoints.common.cli_args"


def refusal_in(error: BaseException) -> str | None:
    """Return the message of a refusal of this package; ``None`` for every other exception.

    A refusal is a ``ValueError`` that code of this package raised. vLLM's configuration consists of
    pydantic classes, which wrap it in a ``ValidationError``.
    """
    import pydantic

    found: list[object] = [error]
    if isinstance(error, pydantic.ValidationError):
        details = error.errors(include_url=False, include_input=False)
        found = [detail.get("ctx", {}).get("error") for detail in details]
    for one in found:
        if type(one) is ValueError and _raised_by_us(one.__traceback__):
            return str(one)
    return None


def _raised_by_us(trace: TracebackType | None) -> bool:
    """Return true if the innermost frame is this package's."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def install() -> None:
    """Print refusals of this package as one line at the end of a command of vLLM.

    All other exceptions go to the previous hook. This is safe to call twice.
    """
    previous = sys.excepthook
    if _COMMAND not in sys.modules or getattr(previous, "prints_refusals", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = refusal_in(error)
        if line is None:
            previous(kind, error, trace)
        else:
            print(f"vllm-diffusion: {line}", file=sys.stderr)

    hook.prints_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = hook
