"""``vllm-diffusion bench-ways`` as a person runs it, with real servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_shipped_checkpoint(tmp_path: Path) -> None:
    """Drafts change no token, and take fewer passes; a server of each way counts what it does."""
    script = Path(sys.executable).with_name("vllm-diffusion")
    done = subprocess.run(
        [
            *(script, "bench-ways", "--num-prompts", "1", "--rounds", "1", "--requests", "4"),
            *("--json", tmp_path / "found"),
        ],
        capture_output=True,
        text=True,
        timeout=1180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "All answers are the same, as promised: autoregressive, linear_spec." in done.stdout
    sides = json.loads((tmp_path / "found").read_text())["results"]
    one, several, canvas = ([each["counted"] for each in side["rounds"]] for side in sides)
    assert re.search(r"^  linear_spec .* yes$", done.stdout, re.M)
    assert re.search(r"^  diffusion .* -$", done.stdout, re.M)
    assert one[0]["tokens"] == several[0]["tokens"] > 20
    assert one[0]["passes"] == one[0]["tokens"] > several[0]["passes"] > 0
    assert several[0]["rows"] > one[0]["rows"] > 0.5 * one[0]["tokens"]
    assert sum(several[0]["verifications"]["accepted"]) > 0
    assert one[0]["verifications"]["number"] == canvas[0]["verifications"]["number"] == 0
