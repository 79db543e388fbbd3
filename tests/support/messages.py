"""Lists what the package says to clients and operators: ``python -m tests.support.messages``."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.house import PACKAGES, ROOT
from vllm_diffusion.requests.exclusions import EXCLUSIONS
from vllm_diffusion.startup.options import sentences

# Functions and errors whose text somebody reads.
SAYING = {
    *("refuse", "info", "info_once", "warning", "warning_once", "error", "fail", "exit", "print"),
    *("UsageError", "SchemaError", "VLLMValidationError", "BodyError", "RetryableRequestError"),
    *("ValueError", "RuntimeError", "GenerationError"),
}


@dataclass(frozen=True)
class Message:
    """What is said in one place.

    Attributes:
        place: File and line.
        by: Name of the function or error.
        texts: Its texts, each with expressions in braces.
    """

    place: str
    by: str
    texts: tuple[str, ...]


def messages() -> Iterator[Message]:
    """Find the messages of the package, file by file, then those of its two tables."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (name := _name(node.func)) in SAYING:
                    texts = [text for text in map(_text, node.args) if " " in text]
                    if texts:
                        place = f"{path.relative_to(ROOT)}:{node.lineno}"
                        yield Message(place, name, tuple(texts))
    for row in EXCLUSIONS:
        yield Message(
            "vllm_diffusion/requests/exclusions.py:EXCLUSIONS",
            "refuse",
            (f"{row.field} {row.message}",),
        )
    for sentence in sentences().values():
        yield Message("vllm_diffusion/startup/refused_options.toml:", "refuse", (sentence,))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return ""


def main() -> None:
    file = Path()
    for message in messages():
        path = Path(message.place.partition(":")[0])
        if path != file:
            print(f"\n{path}")
            file = path
        print(f"  {message.by}: {' | '.join(message.texts)}")


if __name__ == "__main__":
    main()
