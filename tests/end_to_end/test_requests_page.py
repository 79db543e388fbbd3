"""The programs of the pages on requests, Python and the live canvas run as they are written."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.engines import commands
from tests.support.engines.server import Server

pytestmark = pytest.mark.engine

PAGES = Path(__file__).resolve().parents[2] / "docs/use"


def blocks(language: str, page: str = "requests.md") -> list[str]:
    """Return a page's blocks of a language, up to the parameters of requests."""
    text = (PAGES / page).read_text(encoding="utf-8").partition("\n## Parameters")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_script(program: str, folder: Path) -> str:
    """Return the output of a program in a file of its own, which vLLM's engine imports again."""
    script = folder / "program.py"
    script.write_text(program, encoding="utf-8")
    return run([sys.executable, str(script)])


def run(command: list[str], server: Server | None = None) -> str:
    """Return a command's output in the environment that the page describes."""
    of_server = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"} if server else {}
    return commands.run(*command, timeout=600, env={**os.environ, **of_server}).stdout


def test_python_blocks_run_one_after_another(server: Server) -> None:
    """The programs of the page on requests print what the page shows."""
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
    """The program without a server prints the answer, as a script of its own."""
    assert "15" in run_script(blocks("python")[-1], tmp_path).splitlines()


@pytest.mark.slow
def test_live_canvas_block_runs(tmp_path: Path) -> None:
    """The program of the live canvas's page prints frames, a step map and the answer."""
    (program,) = blocks("python", "live-canvas.md")
    printed = run_script(program, tmp_path)
    assert "pmal" in printed.splitlines()
    assert "CanvasStepMap(" in printed
    assert "RequestOutput(" in printed


@pytest.mark.slow
def test_python_page_blocks_run_one_after_another() -> None:
    """The programs of the page on Python print what the page shows."""
    program = [block for block in blocks("python", "python.md") if "asyncio" not in block]
    start, frames, metrics, record, decision, refused = run(
        [sys.executable, "-c", "\nprint('---')\n".join(program)]
    ).split("---\n")
    assert re.search(r"^step 1 of at most \d+: '.*'$", frames, re.MULTILINE)
    assert re.search(r"^decided in steps \(\d.*\)$", frames, re.MULTILINE)
    assert frames.endswith("answer: 'pmal'\n")
    assert re.search(r"^15 \[\d.*\]\n\d+ \(\d+,\)$", metrics, re.MULTILINE)
    assert record == "{'name': 'bob', 'age': 31}\n"
    likely = dict(re.findall(r"^(\d) ([01]\.\d+)$", decision, re.MULTILINE))
    assert float(likely["7"]) + float(likely["9"]) == pytest.approx(1, abs=0.002)
    assert likely["7"] > likely["9"]
    assert re.search("^diffusion_max_steps - diffusion_max_steps must be", refused, re.MULTILINE)
    assert re.search("^LLM: .*", refused, re.MULTILINE)
    assert "max_denoising_steps" in refused


@pytest.mark.slow
def test_watch_async_block_runs(tmp_path: Path) -> None:
    """The program of the page on Python shows frames of an ``AsyncLLM``, then the answer."""
    (program,) = (block for block in blocks("python", "python.md") if "asyncio" in block)
    *frames, answer = re.findall("^(?:step|answer).*$", run_script(program, tmp_path), re.MULTILINE)
    assert frames[0].startswith("step 1: ")
    assert answer == "answer: 'pmal'"
