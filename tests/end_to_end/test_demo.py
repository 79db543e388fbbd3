"""The README's first commands, as a person runs them."""

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.engines.commands import run

pytestmark = pytest.mark.engine

DEMO = (Path(sys.executable).with_name("vllm-diffusion"), "demo")


def _vllm_processes() -> set[int]:
    """Return the vLLM processes below this one, which may include another test's server."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "vllm" in " ".join(child.cmdline())}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["What is 7+8?"], "15"),
        pytest.param(["--family", "sdar"], "1. cat\n2. dog\n3. tree", marks=pytest.mark.slow),
    ],
    ids=["default", "sdar"],
)
def test_demo(arguments: list[str], said: str, tmp_path: Path) -> None:
    """In any folder standard output has the answer alone, and standard error no trace."""
    # Would be imported in vLLM's place if the folder of the user were searched.
    (tmp_path / "vllm.py").write_text("raise SystemExit('wrong vllm')", encoding="utf-8")
    before = _vllm_processes()
    demo = run(*DEMO, *arguments, cwd=tmp_path, timeout=840)
    assert said in demo.stdout
    assert "denoise steps per canvas" in demo.stderr
    assert "tokens per pass" in demo.stderr
    assert "tokens per second" in demo.stderr
    assert "Traceback" not in demo.stderr
    assert _vllm_processes() == before


@pytest.mark.slow
def test_demo_draft() -> None:
    """The tiny pair gives the same answer with the draft, at over 5 tokens per verification."""
    demo = run(*DEMO, "--draft", timeout=840)
    assert demo.stdout.count("3, 4, 5, 6, 7, 8, 9, 10, 11, 12") == 2
    assert "The same answer with the draft and without." in demo.stderr
    (tokens,) = re.findall(r"tokens per verification\s+([\d.]+)", demo.stderr)
    assert float(tokens) > 5
    assert "Traceback" not in demo.stderr
