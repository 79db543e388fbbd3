"""A draft of other tasks becomes one of the server's own tasks, end to end."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.engines.commands import run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

EXAMPLE = (
    Path(__file__).resolve().parents[2] / "examples" / "checkpoints" / "calibrate_tiny_draft.py"
)


def test_calibration(tmp_path: Path) -> None:
    """A draft that is trained on answers that a server recorded raises the tokens per verification
    from below two to above five.
    """
    done = run(sys.executable, EXAMPLE, "--work", tmp_path / "work", timeout=2300)
    assert "1000 exchanges recorded" in done.stdout
    (found,) = re.findall(r"([\d.]+) tokens a verification before, ([\d.]+) after", done.stdout)
    before, after = map(float, found)
    assert before < 2
    assert after > 5
