"""From a draft of other tasks to one of the server's own, end to end; and what is said of two drafts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.recording import read_recording

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

EXAMPLE = (
    Path(__file__).resolve().parents[2] / "examples" / "checkpoints" / "calibrate_tiny_draft.py"
)


def test_calibration(tmp_path: Path) -> None:
    """Recorded by a server, extracted, trained, served: below two tokens a verification to above five."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--work", str(tmp_path / "work")],
        capture_output=True,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1000 exchanges recorded" in done.stdout
    (found,) = re.findall(r"([\d.]+) tokens a verification before, ([\d.]+) after", done.stdout)
    before, after = map(float, found)
    assert before < 2
    assert after > 5


def test_compare(tmp_path: Path) -> None:
    """Three servers: a random draft and the trained one, by their own counters, on held-out prompts."""
    from transformers import AutoTokenizer

    from vllm_diffusion.drafting.reference import ReferenceDraft, load_draft, save_draft

    torch.manual_seed(0)
    target = shipped_checkpoint("qwen3")
    save_draft(ReferenceDraft(load_draft(shipped_draft()).config), tmp_path / "random")
    tokenizer = AutoTokenizer.from_pretrained(target)
    recording = tmp_path / "recording.jsonl"
    lines = []
    for first in range(40):
        question = [{"role": "user", "content": f"Count from {first} to {first + 9}."}]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=False
        )
        lines.append(json.dumps({"prompt_token_ids": prompt, "output_token_ids": [3]}))
    recording.write_text("\n".join(lines))
    num_held_out = sum(each.is_held_out for each in read_recording(recording).exchanges)
    assert num_held_out > 1
    done = subprocess.run(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "compare", str(target)]
        + [str(recording), "--old", str(tmp_path / "random"), "--new", str(shipped_draft())]
        + ["--rounds", "1", "--concurrency", "1", "--json", str(tmp_path / "found.json")]
        + ["--max-model-len", "512", "--enforce-eager"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{num_held_out} prompts, held out of training, of 40 recorded" in done.stderr
    plain, old, new = json.loads((tmp_path / "found.json").read_text())["contenders"]
    assert all(each["failure"] is None for each in (plain, old, new))
    assert old["loads"][0]["same_tokens"] is new["loads"][0]["same_tokens"] is True
    assert old["loads"][0]["tokens_per_verification"] < 2
    assert new["loads"][0]["tokens_per_verification"] > 5
    assert done.stdout.strip().splitlines()[-1].startswith("The new draft is better: ")
