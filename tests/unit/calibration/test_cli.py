"""``vllm-diffusion calibrate``: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from vllm_diffusion.cli.main import main
from vllm_diffusion.drafting.recording import Recorder, Ring


def run(*words: object) -> int:
    return main(["calibrate", *map(str, words)])


def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there, and the command that records there; then nothing any more."""
    folder = tmp_path / "re cording"
    recorder = Recorder(Ring(folder, "engine0", 2**20), pytest.fail)
    for i in range(30):
        recorder.add([i, 1, 2], [3, 4])
    recorder.close()
    with (folder / "engine0-00000000.jsonl").open("a") as file:
        file.write('{"prompt')
    assert run("record", folder, "--max-mib", 3) == 0
    printed = capsys.readouterr().out
    assert "30 exchanges from 20" in printed
    assert "90 tokens of prompts, 60 of answers" in printed
    assert "1 half-written lines were passed over" in printed
    words = shlex.split(printed.splitlines()[-1])
    settings = json.loads(words[words.index("--additional-config") + 1])
    assert settings == {"drafting": {"record": {"folder": str(folder), "max_mib": 3}}}

    assert run("record", folder, "--clear") == 0
    assert run("record", folder) == 0
    assert "holds no exchange" in capsys.readouterr().out
