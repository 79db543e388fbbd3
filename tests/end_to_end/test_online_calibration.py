"""``vllm-diffusion calibrate online`` trains a draft with random weights next to its server, and
swaps it.
"""

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.test_draft_swaps import KEY, ask, swapping
from tests.support.engines.commands import run
from tests.support.engines.tiny_pair import save_random_draft
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

WORDS = ("cat", "table", "horse", "window", "river", "stone", "apple", "cloud", "garden", "paper")
QUESTIONS = [
    f"Count from {first} to {first + length}." for first in range(30) for length in (7, 12)
]
QUESTIONS += [f"Reverse: {one} {other}" for one, other in itertools.permutations(WORDS, 2)]


def test_random_draft(tmp_path: Path) -> None:
    """``calibrate online`` trains a better draft on recorded traffic and swaps it in, and its work
    is halted while the server answers requests.
    """
    recording = tmp_path / "recording"
    drafting = {"record": {"folder": str(recording)}}
    with swapping(tmp_path, save_random_draft(tmp_path / "random"), drafting=drafting) as server:
        command = [sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "online"]
        command += ["--url", server.url, "--api-key", KEY, "--recording", str(recording)]
        command += ["--target", str(shipped_checkpoint("qwen3"))]
        command += ["--drafts", str(tmp_path / "drafts")]
        assert "holds no exchange" in run(*command, status=2).stderr

        expected = {question: ask(server, question) for question in QUESTIONS}
        command += ["--exchanges", "100", "--minutes", "5", "--max-model-len", "512"]
        printed, said = tmp_path / "printed", tmp_path / "said"
        with printed.open("w") as output, said.open("w") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)

        def wait_until(is_so: Callable[[], object]) -> None:
            """Wait; fail with the command's output if it ends, or if its round ends without
            a swap.
            """
            for _ in range(1000):
                if is_so():
                    return
                assert process.poll() is None, said.read_text()
                assert "served on" not in said.read_text(), said.read_text()
                time.sleep(0.5)
            pytest.fail(said.read_text())

        try:
            wait_until(lambda: [*(tmp_path / "drafts").rglob("*.safetensors")])
            # The extraction has begun, and yields; so does the training.
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
            wait_until(printed.read_text)
            for question in QUESTIONS[:12]:
                assert ask(server, question) == expected[question]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    lines = said.read_text().splitlines()
    assert any("On held-out answers" in line for line in lines), lines
    (new,) = (tmp_path / "drafts").iterdir()
    assert printed.read_text() == f"{new} is served.\n", lines
    assert "training: halted, the server has work" in lines
    assert "training: goes on" in lines
    assert (new / "model.safetensors").is_file()
