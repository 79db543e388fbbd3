"""Agents and clients of examples/clients work unmodified with the server.

Each runs in an environment of its own.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.engines.commands import run
from tests.support.engines.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = Path(__file__).resolve().parents[2] / "examples/clients"
# An error of uv when it cannot reach the index.
UNREACHABLE = ("Failed to fetch", "error sending request", "dns error")


def output_of(name: str, server: Server) -> list[str]:
    """Return the lines that a script prints, run with the packages that it names."""
    uv = Path(sys.executable).with_name("uv")
    with_script = ("--python", sys.executable, "--script", CLIENTS / f"{name}.py")
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
    made = run(uv, "sync", *with_script, status=None, env=environment)
    if made.returncode and any(words in made.stderr for words in UNREACHABLE):
        pytest.skip("needs a package index")
    assert made.returncode == 0, made.stderr[-4000:]
    ran = run(uv, "run", *with_script, env=environment)
    server.wait_until_idle()
    return ran.stdout.split("\n")


@pytest.mark.parametrize(
    "name", ["openai_agents", "langchain_agent", "pydantic_agent", "strands_agent"]
)
def test_whole_loop(name: str, server: Server) -> None:
    """An agent calls the tool once with the question's city, and answers with its result."""
    called, answer, *rest = output_of(name, server)
    assert called == "get_weather: Paris"
    assert answer == "Weather in Paris: 21 degrees, sunny."
    assert not any(rest)


def test_smolagents(server: Server) -> None:
    """smolagents gets a call with the question's city, and has the tool's result in its memory."""
    called, *_, observed, end = output_of("smolagents_agent", server)
    assert called == "get_weather: Paris"
    assert observed == "21 degrees, sunny"
    assert not end


def test_guidance(server: Server) -> None:
    """guidance, which also sends fields of older releases, finds a capture of each constraint."""
    chosen, number, record, _ = output_of("guidance_captures", server)
    assert chosen in {"9", "15"}
    assert number.isdigit()
    assert isinstance(json.loads(record)["sum"], int)
