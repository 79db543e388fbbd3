"""A refusal of ours ends a command of vLLM with one line, where vLLM would print a trace."""

from __future__ import annotations

import sys
from types import TracebackType

_PACKAGE = __name__.partition(".")[0]
# Only vLLM's own commands import it. A script that uses ``vllm.LLM`` keeps Python's trace.
_COMMAND = "vllm.entrypoints.common.cli_args"


def refusal_in(error: BaseException) -> str | None:
    """The sentence of a refusal of ours; ``None`` for every other exception.

    A refusal is a ``ValueError`` that code of this package raised. vLLM's configuration is made of
    pydantic's classes, which hand it on inside a ``ValidationError``.
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
    """Whether the innermost frame is this package's."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def install() -> None:
    """Have Python print refusals of ours as one line at the end of a command of vLLM.

    Everything else goes to the hook that was there. Safe to call twice.
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
