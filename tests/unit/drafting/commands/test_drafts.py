"""``vllm-diffusion drafts``; that vLLM takes its commands is in test_docs.py."""

from __future__ import annotations

import json
import shlex

import pytest

from vllm_diffusion.cli.main import main


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "qwen3.5-27b"])
def test_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is known of one, and the publisher's command, by a repository or the end of its name."""
    assert main(["drafts", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "target  Qwen/Qwen3.5-27B"
    assert lines[1] == "draft   z-lab/Qwen3.5-27B-DFlash"
    assert lines[2] == "block   16 (num_speculative_tokens 15)"
    assert lines[3].startswith("causal  5 layers of 6")
    words = shlex.split(lines[-1])
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3.5-27B"]
    assert json.loads(words[4]) == {
        "method": "dflash",
        "model": "z-lab/Qwen3.5-27B-DFlash",
        "num_speculative_tokens": 15,
    }
    assert words[5:] == ["--attention-backend", "flash_attn", "--max-num-batched-tokens", "32768"]
