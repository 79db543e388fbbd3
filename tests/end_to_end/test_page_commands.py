"""Commands of the pages for the shipped checkpoints run as they are written."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from docs.tables import PAGES
from tests.support.engines.commands import run
from tests.support.engines.server import is_ready

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# The server's block ends with its command, which goes on in the background until the others have
# run.
SCRIPT = """
set -e
{serve} &
trap 'kill -TERM $!; wait $!' EXIT
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do kill -0 $!; sleep 0.5; done
{commands}
"""


# Words of commands that other tests run, in a form that a test has time or a machine for.
ELSEWHERE = {
    "chat": "test_commands_of_pages, and tests/unit/test_chat.py",
    "serve-page": "tests/integration/test_page_server.py, and tests/unit/test_cli.py",
    "bench-drafts": "tests/end_to_end/test_bench_drafts.py",
    "calibrate": "tests/end_to_end/test_calibration.py and test_draft_swaps.py",
    "swap-draft": "tests/end_to_end/test_draft_swaps.py",
    "doctor": "tests/null_gpu",
    "ray": "tests/end_to_end/test_nodes.py",
}


def blocks(page: str) -> list[str]:
    """Return the shell blocks of a page, each command on one line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\\\n *", "", each).strip() for each in found]


def block(page: str, holds: str) -> str:
    """Return the one shell block of a page that holds a text."""
    (found,) = [each for each in blocks(page) if holds in each]
    return found


def lines(holds: str, block_without: str = "```") -> list[list[str]]:
    """Return the lines of each block that have a text, without those run elsewhere."""
    found = []
    for page in PAGES:
        for each in blocks(str(page)):
            if block_without in each:
                continue
            without_comments = [line.partition("  #")[0].strip() for line in each.splitlines()]
            named = [line for line in without_comments if holds in line]
            named = [line for line in named if ELSEWHERE.keys().isdisjoint(line.split())]
            found.append(named)
    return [each for each in found if each]


def servers() -> Iterator[str]:
    """Yield the commands of one server or, where several share one address, of all of them."""
    # Those with a key are run by test_commands_of_pages and test_requests_page.py.
    for commands in lines('vllm serve "$(vllm-diffusion checkpoint', "export VLLM_API_KEY"):
        yield from ["\n".join(commands)] if "-address" in "".join(commands) else commands


@pytest.fixture
def port_of_pages() -> None:
    with socket.socket() as taken:
        if not taken.connect_ex(("127.0.0.1", 8000)):
            pytest.skip("needs port 8000, which the pages name")


def users_environment() -> dict[str, str]:
    """Return the environment without what a user has not set."""
    unset = ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return environment


@pytest.mark.usefixtures("port_of_pages")
@pytest.mark.parametrize("commands", list(servers()), ids=str)
def test_server(commands: str) -> None:
    """Every server of the pages answers on each port of its commands, and ends on request."""
    running = [
        subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=users_environment(), start_new_session=True
        )
        for command in commands.splitlines()
    ]
    try:
        for port in re.findall(r"--port (\d+)", commands) or ["8000"]:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 300
            while not is_ready(url):
                assert [server.poll() for server in running] == [None] * len(running)
                assert time.monotonic() < deadline
                time.sleep(0.5)
            message = {"role": "user", "content": "What is 7+8?"}
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": [message], "max_tokens": 32, "temperature": 0},
                timeout=120,
            )
            said = answer.json()["choices"][0]["message"]["content"]
            # The tiny MinerU-Diffusion reads pictures alone (test_documents.py).
            assert said == "15" or "mineru" in commands, answer.text
    finally:
        for server in running:
            server.send_signal(signal.SIGTERM)
        ended = [server.wait(60) for server in running]
    assert ended == [0] * len(running)


@pytest.mark.parametrize(
    "command",
    sorted(
        {
            command
            for commands in lines("vllm-diffusion")
            for command in commands
            if command.startswith("vllm-diffusion ")
        }
    ),
)
def test_own_command(command: str) -> None:
    """Each command that needs neither a server nor another model prints something."""
    assert run("bash", "-c", command, cwd=ROOT, env=users_environment()).stdout


@pytest.mark.usefixtures("port_of_pages")
def test_commands_of_pages() -> None:
    """The server starts, and the clients that the pages name get right answers from it."""
    chat = block("docs/use/live-canvas.md", "vllm-diffusion chat").splitlines()[1]
    bench = block("docs/use/serving.md", "vllm bench serve")
    page = (ROOT / "docs/use/serving.md").read_text(encoding="utf-8")
    examples = re.findall(r"`(examples/\w+\.py)`", page.partition("## The 26B")[0])
    assert len(examples) == 2
    commands = [
        block("docs/use/serving.md", "openai_client.py"),
        *(f"python {example}" for example in examples),
        f"{chat} <<< 'What is 7+8?'",
        # The first measures a GPU, for longer.
        "vllm bench serve" + bench.split("vllm bench serve")[2],
    ]
    serve = block("docs/use/serving.md", 'vllm serve "$(vllm-diffusion checkpoint)"')
    script = SCRIPT.format(serve=serve, commands="\n".join(commands))
    ended = run("bash", "-c", script, cwd=ROOT, env=users_environment(), timeout=840)
    for said in (
        "answer:    15\n",
        "streamed:  15\n",
        "answer: lamp: LAMP",
        "{'name': 'kite', 'age': 42}\n",
        "\n15\n",
    ):
        assert said in ended.stdout, ended.stdout
    assert re.search(r"Successful requests: +4\b", ended.stdout), ended.stdout
    # 0.00 where vLLM drops the chunks of a canvas.
    assert re.search(r"Mean TPOT \(ms\): +(?!0\.00)[0-9.]+", ended.stdout), ended.stdout
