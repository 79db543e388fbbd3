"""Tests of the public names: the page on Python lists them, and examples import nothing else."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [f"vllm_diffusion.{name}" for name in ("checkpoints", "live", "metrics")]
# Not those of examples/checkpoints, which make the shipped checkpoints.
EXAMPLES = sorted(
    path
    for folder in (".", "adapters", "clients", "drafting", "quantization", "rl")
    for path in (ROOT / "examples" / folder).glob("*.py")
)


@pytest.fixture(scope="module")
def public() -> set[str]:
    """Return the full names that the public modules export."""
    return {
        f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__
    }


@pytest.mark.engine
def test_reference_lists_what_is_public(public: set[str]) -> None:
    """The reference of the page on Python has each public name once, and no other."""
    page = (ROOT / "docs/use/python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `(\S+)`$", page, re.MULTILINE)
    assert sorted(listed) == sorted(public)


@pytest.mark.engine
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_public_names(path: Path, public: set[str]) -> None:
    """An example imports nothing of this package that is private."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name for name in found if re.match(r"vllm_diffusion\b|attention_kernels\b", name)}
    assert own <= public
