"""``vllm-diffusion drafts``; that vLLM takes its commands is in test_docs.py."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.support.commands import refusal_of
from vllm_diffusion.cli.main import main
from vllm_diffusion.drafting.commands.drafts import presets


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Each target once, its draft beside it."""
    assert main(["drafts"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"] in rows
    assert rows == [[preset.target, preset.draft] for preset in presets()]
    assert len({target for target, _ in rows}) == len(rows)


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


def test_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """One line that lists the known targets, and nothing on standard output."""
    said = refusal_of(capsys, "drafts", "Qwen3.5")
    assert all(preset.target in said for preset in presets())
