"""``vllm-diffusion bench-ways``, with fake servers where vLLM's would be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import fake_server
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.drafting.commands import draft_runs

ONCE = ("--rounds", "1", "--requests", "1")


class Ways:
    """Runs the command with fake servers.

    Attributes:
        behaviours: Of servers, by their rule.
        sections: Settings that each server got.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.behaviours = {"autoregressive": "plain", "linear_spec": "verifies"}
        self.sections: list[dict[str, object]] = []

    def serve(self, _: str, *options: str) -> list[str]:
        section = {}
        if "--additional-config" in options:
            section = json.loads(options[options.index("--additional-config") + 1])["diffusion"]
        self.sections.append(section)
        rule = section.get("rule", "diffusion")
        return fake_server.command(self.behaviours.get(rule, "verifies-otherwise"))

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        status = status_of("bench-ways", *arguments)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err


@pytest.fixture
def ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ways:
    made = Ways(capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(draft_runs, "vllm_serve", made.serve)
    Path("data.jsonl").write_text('{"task": "a", "prompt": "x"}\n{"task": "b", "prompt": "y"}\n')
    return made


def test_figures(ways: Ways) -> None:
    """What each server counts of an answer, side by side; another law's answers are not compared."""
    options = ("--rounds", "2", "--requests", "1", "3", "--json", "out.json")
    status, out, err = ways("model", "--data", "data.jsonl", *options)
    assert (status, "Traceback" in err) == (0, False)
    assert ways.sections == [{"rule": "autoregressive"}, {"rule": "linear_spec"}, {}]
    for pattern in (
        # Ten tokens of an answer: one pass each, the first one's over the prompt.
        r"^  way +tokens/s +ratio .* kept/draft +passes/token +rows/token +same tokens$",
        r"^  autoregressive +[\d.]+ +1\.00 .* - +1\.00 +0\.90 +yes$",
        r"^  linear_spec +[\d.]+ .* 1\.50 +0\.50 +1\.60 +yes$",
        r"^  diffusion +[\d.]+ .* 1\.50 +0\.50 +1\.60 +-$",
    ):
        assert len(re.findall(pattern, out, re.M)) == 2, (pattern, out)
    assert re.search(r"^  position +1 +2\n  linear_spec +100 +50$", out, re.M)
    assert out.endswith("All answers are the same, as promised: autoregressive, linear_spec.\n")
    # As many prompts as requests at a time, each of one task.
    assert "3 prompts of all; " in out
    rounds = json.loads(Path("out.json").read_text())["results"][0]["rounds"]
    assert {len(each["answers"]) for each in rounds} == {3}


def test_other_answers(ways: Ways) -> None:
    """Answers that differ where they may not end the command with status 1, and are said in one line."""
    ways.behaviours["linear_spec"] = "verifies-otherwise"
    given = ("diffusion", "linear_spec,draft_length=8", "autoregressive")
    status, out, _ = ways("model", "--data", "data.jsonl", *ONCE, "--ways", *given)
    assert status == 1
    assert out.endswith(
        "Answers DIFFER from those of autoregressive: linear_spec,draft_length=8.\n"
    )
    # At a temperature, and of one way alone, nothing is promised.
    for options in (("--temperature", "1"), ("--ways", "linear_spec", "diffusion")):
        status, out, _ = ways("model", "--data", "data.jsonl", *ONCE, *options)
        assert status == 0
        assert "No answers were compared" in out
