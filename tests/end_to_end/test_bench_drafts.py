"""``vllm-diffusion bench-drafts`` as a user runs it, with real servers."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.engines.commands import run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

BENCH_DRAFTS = (Path(sys.executable).with_name("vllm-diffusion"), "bench-drafts")


def test_tiny_pair(tmp_path: Path) -> None:
    """With the shipped draft a server gives the same tokens in fewer passes, and the report names
    the reason why a method whose package is missing has no figures.
    """
    data = tmp_path / "two.jsonl"
    data.write_text(
        '{"task": "count", "messages": [{"role": "user", "content": "Count from 3 to 12."}]}\n'
        '{"task": "sums", "messages": [{"role": "user", "content": "What is 7+8?"}]}\n'
    )
    options = ("--method", "dflash", "suffix", "--data", data, "--rounds", "1")
    options += ("--concurrency", "1", "--json", tmp_path / "found")
    # One server does not start.
    done = run(*BENCH_DRAFTS, *options, status=1, timeout=880)
    plain, drafted, suffix = json.loads((tmp_path / "found").read_text())["results"]
    assert (plain["failure"], drafted["failure"]) == ("", "")
    assert "Arctic Inference is required" in suffix["failure"]
    assert f"suffix: no figures. {suffix['failure']}" in done.stdout
    ours, theirs = ([each["counted"] for each in side["rounds"]] for side in (drafted, plain))
    assert [each["tokens"] for each in ours] == [each["tokens"] for each in theirs]
    counts = [each["verifications"] for each in ours]
    # Of counting.
    assert sum(counts[0]["accepted"]) > 4 * counts[0]["number"] > 0
    assert not any(each["verifications"]["number"] for each in theirs)
    assert re.search(r"^  dflash .* yes$", done.stdout, re.M)
    assert "  dflash " in done.stdout
    assert "Traceback" not in done.stderr


def test_ways(tmp_path: Path) -> None:
    """Drafting by ``linear_spec`` changes no token and takes fewer passes than the autoregressive
    way, and the server of each way counts its own passes and verifications.
    """
    options = ("--method", "autoregressive", "linear_spec", "diffusion", "mixed")
    options += ("--num-prompts", "1", "--rounds", "1", "--concurrency", "4")
    done = run(*BENCH_DRAFTS, *options, "--json", tmp_path / "found", timeout=1180)
    assert "All answers are the same, as promised: autoregressive, linear_spec." in done.stdout
    sides = json.loads((tmp_path / "found").read_text())["results"]
    one, several, canvas, _ = ([each["counted"] for each in side["rounds"]] for side in sides)
    assert re.search(r"^  linear_spec .* yes$", done.stdout, re.M)
    assert re.search(r"^  diffusion .* -$", done.stdout, re.M)
    assert one[0]["tokens"] == several[0]["tokens"] > 20
    assert one[0]["passes"] == one[0]["tokens"] > several[0]["passes"] > 0
    assert several[0]["rows"] > one[0]["rows"] > 0.5 * one[0]["tokens"]
    assert sum(several[0]["verifications"]["accepted"]) > 0
    assert one[0]["verifications"]["number"] == canvas[0]["verifications"]["number"] == 0
