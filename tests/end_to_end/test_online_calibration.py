"""``vllm-diffusion calibrate online`` beside a server whose draft knows nothing: it learns, and is swapped."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.end_to_end.test_draft_swaps import KEY, ask, swapping
from tests.support.tiny_pair import save_random_draft
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

WORDS = ("cat", "table", "horse", "window", "river", "stone", "apple", "cloud", "garden", "paper")
QUESTIONS = [
    f"Count from {first} to {first + length}." for first in range(30) for length in (7, 12)
]
QUESTIONS += [f"Reverse: {one} {other}" for one, other in itertools.permutations(WORDS, 2)]


def test_random_draft(tmp_path: Path) -> None:
    """Recorded traffic in, a better draft out, and swapped in: halted while the server is asked."""
    recording = tmp_path / "recording"
    drafting = {"record": {"folder": str(recording)}}
    with swapping(tmp_path, save_random_draft(tmp_path / "random"), drafting=drafting) as server:
        command = [sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "online"]
        command += ["--url", server.url, "--api-key", KEY, "--recording", str(recording)]
        command += ["--target", str(shipped_checkpoint("qwen3"))]
        command += ["--drafts", str(tmp_path / "drafts"), "--rounds", "1"]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "holds no exchange" in refused.stderr

        expected = {question: ask(server, question) for question in QUESTIONS}
        command += ["--exchanges", "100", "--idle-seconds", "2"]
        command += ["--minutes", "8", "--steps", "150", "--max-model-len", "512"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        said: list[str] = []
        extracted = threading.Event()

        def listen() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if "samples," in line:
                    extracted.set()
            extracted.set()

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            assert extracted.wait(400)
            # The training has begun, and yields.
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
            assert process.stdout is not None
            output = process.stdout.read()
            process.wait(60)
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
        finally:
            process.kill()
            listener.join()
    assert process.returncode == 0, said
    assert any("On held-out answers" in line for line in said), said
    (new,) = (tmp_path / "drafts").iterdir()
    assert f"{new} is served." in output, output
    assert "training: halted, the server has work\n" in said
    assert "training: goes on\n" in said
    assert (new / "model.safetensors").is_file()
