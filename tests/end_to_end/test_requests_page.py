"""The requests that the page on requests begins with, run as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.engine

PAGE = Path(__file__).resolve().parents[2] / "docs/use/requests.md"


def blocks(language: str) -> list[str]:
    """The page's blocks of a language, up to its parameters."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Parameters")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(command: list[str], server: Server | None = None) -> str:
    """What a command prints in the environment that the page has its reader make."""
    of_server = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"} if server else {}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **of_server}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_python_blocks_run_one_after_another(server: Server) -> None:
    """Answer, stream, schema, call, log-probabilities, frames, pins and decision are printed as the page says."""
    *asked, _ = blocks("python")
    said = run([sys.executable, "-c", "\nprint('---')\n".join(asked)], server).split("---\n")
    answer, stream, schema, call, logprobs, frames, pinned, decision = said
    assert answer.strip() == "15"
    assert re.findall("[1-5]", stream) == ["1", "2", "3", "4", "5"]
    assert "'age'" in schema
    assert call.startswith("get_weather {'city'")
    assert re.search(r"^'.*' -[0-9.e-]+ \['.*', '.*'\]$", logprobs, re.MULTILINE)
    assert re.search("^1 '", frames, re.MULTILINE)
    assert pinned.startswith("7")
    assert "15" in decision


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_the_answer(server: Server) -> None:
    """The page's command line prints the completion as JSON."""
    command = blocks("sh")[1]
    assert "curl" in command
    printed = json.loads(run(["bash", "-c", command], server))
    assert printed["choices"][0]["message"]["content"].strip() == "15"


@pytest.mark.slow
def test_offline_block_runs(tmp_path: Path) -> None:
    """The block without a server prints the answer, as a script of its own."""
    script = tmp_path / "answer.py"
    script.write_text(blocks("python")[-1], encoding="utf-8")
    assert "15" in run([sys.executable, str(script)]).splitlines()
