"""``vllm-diffusion calibrate collect``, with a few lines of HTTP server where vLLM would be."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_server
from tests.support.commands import status_of
from vllm_diffusion.drafting.commands import calibrate


def collected(url: str, *options: str, num_prompts: int) -> int:
    """Ask so many prompts; the exit status."""
    Path("data.jsonl").write_text('{"prompt": "a"}\n' * num_prompts)
    return status_of("calibrate", "collect", "--url", url, "--data", "data.jsonl", *options)


def test_collect(running: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt is asked once; what fails is reported, and a server that is gone ends it."""
    options = ("--concurrency", "3", "--max-tokens", "5")
    assert collected(running("plain"), *options, num_prompts=40) == 0
    assert capsys.readouterr().out.startswith("40 of 40 prompts answered, 400 tokens in ")
    asked = fake_server.asked("plain")
    assert len(asked) == 40
    assert {(each["model"], each["max_tokens"], each["key"]) for each in asked} == {
        ("served", 5, "Bearer secret")
    }
    assert all("temperature" not in each for each in asked)

    breaks = running("breaks")
    assert collected(breaks, "--concurrency", "1", num_prompts=8) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("3 of 8 prompts answered, 30 tokens in ")
    assert captured.err.count("too long") == 1
    assert collected(breaks, num_prompts=40) == 1
    assert "16 prompts in a row failed, the last so:" in capsys.readouterr().err
    assert collected("http://127.0.0.1:9", num_prompts=40) == 1
    assert capsys.readouterr().err == "The server cannot be reached at 127.0.0.1:9.\n"


def test_collect_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No more requests at a time than are allowed, and a line of progress now and then."""
    monkeypatch.chdir(tmp_path)
    lock, at_once, most = threading.Lock(), 0, 0

    def answers(*_: object) -> list[tuple[int, ...]]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        return [(1, 2)]

    monkeypatch.setattr(calibrate, "answers", answers)
    monkeypatch.setattr(calibrate, "first_model", lambda client: "m")
    monkeypatch.setattr(calibrate, "_REPORT_SECONDS", 0.02)
    assert collected("http://a", "--concurrency", "4", num_prompts=30) == 0
    assert most == 4
    assert re.search(r"^ +0 s  \d+ of 30 prompts, \d+ tokens$", capsys.readouterr().err, re.M)
