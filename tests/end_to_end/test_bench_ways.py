"""``vllm-diffusion bench-ways`` as a person runs it, with real servers."""

from __future__ import annotations

import json
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
    plain, drafted, denoised = json.loads((tmp_path / "found").read_text())["contenders"]
    (one,), (several,), (canvas,) = (each["loads"] for each in (plain, drafted, denoised))
    assert (one["same_tokens"], several["same_tokens"], canvas["same_tokens"]) == (True, True, None)
    assert one["tokens"] == several["tokens"] > 20
    assert one["passes_per_token"] == 1 > several["passes_per_token"] > 0
    assert several["rows_per_token"] > one["rows_per_token"] > 0.5
    assert several["tokens_per_verification"] > 1
    assert several["verifications"] > 0 == one["verifications"] == canvas["verifications"]
