"""The one way in which this package puts something in the place of a function or name of vLLM's.

Each replacement stands next to the code that needs it, with its reason and with what vLLM would
have to offer so that it can go. ``tests/support/vllm_symbols.py`` finds them by the decorators.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "_stands_in_for_vllm"
# By target, what was put there, and what was there before. Values that are not functions have no
# room for the mark.
_placed: dict[str, Any] = {}
_stock: dict[str, Any] = {}


@dataclass(frozen=True)
class Replacement:
    """Replacement of one or more names of vLLM's, once it is installed.

    Attributes:
        make: Given vLLM's function or value, and what :meth:`install` is given, returns ours. Ours
            must leave models that are not ours to vLLM's.
        targets: ``module:attribute.path`` of each name.
        reason: Why, in one sentence.
        until: What of vLLM would end the replacement, in one sentence.
    """

    make: Callable[..., Any]
    targets: tuple[str, ...]
    reason: str
    until: str

    def install(self, *arguments: Any) -> None:
        """Put ours in the place of every target. Safe to call twice: ours is never replaced.

        Args:
            arguments: Passed on to ``make`` after what was there.
        """
        for target in self.targets:
            module, _, path = target.partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            stock = getattr(owner, name)
            if not hasattr(stock, _MARK) and (
                target not in _placed or stock is not _placed[target]
            ):
                ours = self.make(stock, *arguments)
                if inspect.isfunction(ours):
                    # A check of signatures still sees what was there.
                    functools.update_wrapper(ours, stock, assigned=(), updated=())
                    setattr(ours, _MARK, True)
                _stock[target], _placed[target] = stock, ours
                setattr(owner, name, ours)


def stock_value(target: str, current: Any) -> Any:
    """The value of a target that vLLM brings, also where this process has put ours in its place.

    Args:
        target: ``module:attribute.path``.
        current: What is there now.
    """
    return _stock[target] if current is _placed.get(target, _stock) else current


def replaces(*targets: str, reason: str, until: str) -> Callable[[Callable[..., Any]], Replacement]:
    """Make a replacement of the function that makes ours of vLLM's.

    Args:
        targets: ``module:attribute.path`` of each name of vLLM's, as string literals.
        reason: Why ours is needed, in one sentence.
        until: What of vLLM would end the replacement, in one sentence.
    """
    return lambda make: Replacement(make, targets, reason, until)


def replaces_call(
    *targets: str, reason: str, until: str
) -> Callable[[Callable[..., Any]], Replacement]:
    """Make a replacement of a function that is called in the place of vLLM's.

    Its arguments are vLLM's function, what :meth:`Replacement.install` is given, and those of the
    call.

    Args:
        targets: As in :func:`replaces`, likewise the others.
        reason: Why ours is needed.
        until: What of vLLM would end the replacement.
    """

    def replacement(ours: Callable[..., Any]) -> Replacement:
        def make(stock: Any, *installed: Any) -> Callable[..., Any]:
            @functools.wraps(ours)
            def call(*args: Any, **kwargs: Any) -> Any:
                return ours(stock, *installed, *args, **kwargs)

            return call

        return Replacement(make, targets, reason, until)

    return replacement
