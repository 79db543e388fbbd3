"""A constraint whose compilation does not end is given up, and keeps nobody waiting."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import RetryableRequestError
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.admission import refused
from vllm_diffusion.requests import readers
from vllm_diffusion.requests.constraint import read_constraint, read_constraint_aside
from vllm_diffusion.requests.json_schema import SchemaError, guided_schema
from vllm_diffusion.requests.readers import GIVEN_UP, Reading, _Reader, compiling_problem
from vllm_diffusion.requests.threads import LeavableThreads
from vllm_diffusion.requests.tool_calls import leaf_values
from vllm_diffusion.requests.tool_calls.read_tools import ANY_TOOL, read_tools

CONFIG = StructuredOutputsConfig()


@pytest.fixture
def a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reading compile for a second; what does not end shows the same with the default."""
    monkeypatch.setattr(readers, "MOST_SECONDS", 1)


def joined_patterns(count: int) -> dict[str, Any]:
    """Return a schema of some 50 characters a pattern; each doubles what it takes to compile."""
    patterns = (f"^.*[a-{chr(97 + i % 26)}]{{2}}.{{{i}}}.*$" for i in range(count))
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def patterns_of_names(count: int) -> dict[str, Any]:
    """Return a schema that takes the third power of its length to compile."""
    names = (f"^p{i}[a-z]{{1,9}}$" for i in range(count))
    return {"type": "object", "patternProperties": {name: {"type": "null"} for name in names}}


@pytest.mark.usefixtures("a_second")
@pytest.mark.parametrize("schema", [joined_patterns(40), patterns_of_names(1500)])
def test_endless_schema(schema: dict[str, Any]) -> None:
    """A schema that takes for ever is refused with the limit, and the next one is read."""
    with pytest.raises(SchemaError, match=f"^#: {GIVEN_UP}"):
        guided_schema(schema)
    guided_schema(patterns_of_names(50))


def test_no_process_for_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be started a constraint is a 503 with the cause; the next is read."""

    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(_Reader, "_idle", [])
        patch.setattr(subprocess, "Popen", refusing)
        constraint = StructuredOutputsParams(json=patterns_of_names(2))
        with pytest.raises(RetryableRequestError, match="Too many open files") as refused:
            asyncio.run(read_constraint_aside(constraint, CONFIG))
        assert refused.value.status_code == 503
    asyncio.run(read_constraint_aside(constraint, CONFIG))


@pytest.mark.usefixtures("a_second")
def test_one_limit_for_a_request() -> None:
    """All that a request has compiled has one limit: beyond it nothing more is compiled."""
    endless = json.dumps(joined_patterns(40))
    with Reading(), Reading():
        assert compiling_problem("regex", "a") is None
        assert compiling_problem("json", endless) == GIVEN_UP
        assert compiling_problem("regex", "a") == GIVEN_UP
    assert compiling_problem("regex", "a") is None


EBNF = "root ::= " + "[^a-z]*" * 4000
TAG = json.dumps({"format": {"type": "json_schema", "json_schema": joined_patterns(40)}})


@pytest.mark.usefixtures("a_second")
@pytest.mark.parametrize(
    "constraint",
    [
        {"grammar": f"start: %json {json.dumps(joined_patterns(40))}"},
        {"grammar": EBNF},
        {"structural_tag": TAG},
    ],
    ids=["lark", "ebnf", "tag"],
)
def test_endless_constraint_of_another_kind(constraint: dict[str, str]) -> None:
    """Grammars and tags are given up as schemas are, with an error that names the field."""
    params = StructuredOutputsParams(**constraint)
    with refused("structured_outputs", GIVEN_UP):
        read_constraint(params, CONFIG)


def test_clients_that_leave() -> None:
    """Readings whose clients have left end at once: more of them than threads delay nobody."""

    async def leave_and_read() -> None:
        readings = []
        for i in range(8):
            params = StructuredOutputsParams(json={**joined_patterns(40), "title": str(i)})
            readings.append(asyncio.ensure_future(read_constraint_aside(params, CONFIG)))
        await asyncio.sleep(0.5)
        for reading in readings:
            assert not reading.done()
            reading.cancel()
        results = await asyncio.gather(*readings, return_exceptions=True)
        assert {type(result) for result in results} == {asyncio.CancelledError}
        params = StructuredOutputsParams(json={"title": "after clients that left"})
        await read_constraint_aside(params, CONFIG)
        assert params._backend == "guidance"

    asyncio.run(leave_and_read())


def test_reader_without_its_client() -> None:
    """A reader ends with the process that asks it, before its limit, whatever it compiles."""
    reader = _Reader.take()
    assert reader.ask("regex", "a") is None
    reader._connection.send(("json", json.dumps(joined_patterns(40))))
    time.sleep(0.5)
    reader._connection.close()
    # Zero if it had not begun to compile.
    assert reader._process.wait(120) in (0, -signal.SIGIO)


def test_endless_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict tool whose schema takes too long has that problem; any other takes anything."""
    monkeypatch.setattr(leaf_values, "compiling_problem", lambda *_: GIVEN_UP)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "given up"}}}
    for strict in (True, False):
        tool = SimpleNamespace(name="t", strict=strict, parameters=schema)
        read = read_tools([tool])["t"]
        assert (GIVEN_UP in str(read.problem)) == strict
        assert read.arguments == ANY_TOOL.arguments


def test_threads_that_are_left() -> None:
    """A call that takes too long fails, the next one gets a thread, and no end waits for either."""
    for_ever = threading.Event()
    threads = LeavableThreads(1, "grammar", most_seconds=0.1)
    with pytest.raises(TimeoutError, match="the grammar takes more than 0.1 s"):
        threads.submit(for_ever.wait).result()
    assert threads.submit(int, "7").result() == 7
    threads = LeavableThreads(1, "test")
    running, waiting = threads.submit(for_ever.wait), threads.submit(int, "7")
    while not running.running():
        pass
    threads.shutdown(wait=True, cancel_futures=True)
    assert waiting.cancelled()
    for_ever.set()
    assert running.result()


def test_process_that_ends() -> None:
    """A process ends while its threads work and its readers compile."""
    program = (
        "import json, threading, sys\n"
        "from vllm_diffusion.requests.readers import compiling_problem\n"
        "from vllm_diffusion.requests.threads import LeavableThreads\n"
        "threads = LeavableThreads(2, 'test')\n"
        "threads.submit(threading.Event().wait)\n"
        "assert compiling_problem('regex', 'a') is None\n"
        "threads.submit(compiling_problem, 'json', sys.argv[1])\n"
    )
    schema = json.dumps(joined_patterns(40))
    subprocess.run([sys.executable, "-c", program, schema], check=True, timeout=120)
