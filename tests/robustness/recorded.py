"""Records what the product answers, so that a refactoring can be compared with it.

    python -m tests.robustness.recorded --write before.json
    python -m tests.robustness.recorded --write after.json
    python -m tests.robustness.recorded --compare before.json after.json

A recording has three parts. *Requests*: those of a campaign (``requests.py``) at servers of
DiffusionGemma and SDAR in both orders of passes: status, refused field, message, answer with its
token ids, and how many passes and denoising steps each group of them took. *Commands*: usage of
each command. *Refusals*: every message that a test expects to be raised. The comparison prints what
differs side by side; paths, ports and seconds are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.robustness.campaign import describe
from tests.robustness.client import Outcome, answers, events, send
from tests.robustness.requests import CHAT, COMPLETIONS, Request, Served, draw_request
from tests.support.engines.server import PARSERS, Server, start_server, stop_server
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.main import build_parser

REQUESTS = 2000
SEED = 27
# Requests whose passes are counted together. The order in which they arrive decides nothing: no
# prefix is cached, none is preempted, none waits for another.
GROUP = 25
CLIENTS = 8
DEADLINE_SECONDS = 300.0
CHECKPOINTS = {"DiffusionGemma": "diffusion_gemma", "SDAR": "sdar"}
# What the requests of a campaign ask of DiffusionGemma's rule and SDAR's has not.
NOT_OF_SDAR = (
    *("diffusion_entropy_bound", "diffusion_confidence_threshold"),
    *("diffusion_stability_threshold", "diffusion_t_max", "diffusion_t_min"),
    *("diffusion_canvas_length", "diffusion_preset"),
)
SDAR_CANVAS_LENGTH = 8
ORDERS = {"sync": "--no-async-scheduling", "async": "--async-scheduling"}
COUNTERS = ("vllm_diffusion:passes_total", "vllm_diffusion:denoise_steps_per_canvas_sum")
# Where tests hold what is refused, besides requests.
REFUSAL_TESTS = (
    *("tests/unit/startup", "tests/unit/requests", "tests/unit/families"),
    *("tests/integration/test_bad_startup.py", "tests/integration/families/test_bad_input.py"),
)
_VARIABLE = (
    (re.compile(r"(/[\w.@+-]+){2,}"), "<path>"),
    (re.compile(r"127\.0\.0\.1:\d+"), "<address>"),
    (re.compile(r"\b[0-9a-f]{16,}\b"), "<id>"),
    (re.compile(r"\d+(\.\d+)? (s|seconds|GiB|MiB|GB|MB)\b"), "<amount>"),
    (re.compile(r" at 0x[0-9a-f]+"), ""),
)


def without_variables(text: str) -> str:
    """A message without what differs from run to run."""
    for pattern, name in _VARIABLE:
        text = pattern.sub(name, text)
    return " ".join(text.split())


def reproducible(request: Request, number: int, family: str) -> Request:
    """A request whose answer is a function of it alone, and which reports its token ids."""
    body = request.body
    if request.kind != "hostile" and request.path in (COMPLETIONS, CHAT):
        body = {"seed": number, **body, "return_token_ids": True}
    if request.kind == "valid" and family == "SDAR" and "vllm_xargs" in body:
        xargs = body["vllm_xargs"].items()
        body["vllm_xargs"] = {name: value for name, value in xargs if name not in NOT_OF_SDAR}
    return dataclasses.replace(request, body=body, leaves_after=None)


def _token_ids(text: str) -> list[Any]:
    """Token ids of an answer, those of each event where it is a stream."""
    parts = events(text) or [json.loads(text)]
    return [choice.get("token_ids") for part in parts for choice in part.get("choices", ())]


def row_of(request: Request, outcome: Outcome) -> dict[str, Any]:
    """What is recorded of one request."""
    row: dict[str, Any] = {"kind": request.kind, "path": request.path, "status": outcome.status}
    if outcome.ending != "answer":
        return row | {"status": outcome.ending}
    if outcome.status is None or outcome.status >= 400:
        found = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', outcome.text)
        field = re.search(r'"param": ?("(?:[^"\\]|\\.)*"|null)', outcome.text)
        return row | {
            "field": json.loads(field[1]) if field else None,
            "message": without_variables(json.loads(found[1]) if found else outcome.text[:200]),
        }
    if request.path not in (COMPLETIONS, CHAT) or request.kind == "hostile":
        return row
    said = answers(request, outcome)
    flat = [ids for ids in _token_ids(outcome.text) if ids]
    joined = [token for ids in flat for token in ids] if len(said) == 1 else sorted(flat)
    content = json.dumps([said, joined])
    return row | {
        "text": str(said[0][0])[:40] if said else "",
        "tokens": hashlib.sha256(content.encode()).hexdigest()[:12],
    }


def counters(server: Server) -> list[int]:
    """Passes and denoising steps that a server has counted."""
    found = []
    for name in COUNTERS:
        try:
            found.append(round(server.metric(name)))
        except AssertionError:
            found.append(0)
    return found


def record_server(
    server: Server, served: Served, numbers: range, family: str
) -> Iterator[dict[str, Any]]:
    """Rows of some requests, and after each group one of what it took.

    What is not counted is sent when the others are: hostile requests, whose seed may be theirs to
    choose, and those with stop strings, which the API process finds while passes go on.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with (
        httpx.Client(base_url=server.url, limits=limits) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for first in track(range(0, len(numbers), GROUP), family):
            group = {
                number: reproducible(draw_request(served, SEED, number), number, family)
                for number in numbers[first : first + GROUP]
            }
            before = counters(server)
            for counts in (True, False):
                some = {
                    number: request
                    for number, request in group.items()
                    if counts == (request.kind != "hostile" and "stop" not in request.body)
                }
                outcomes = pool.map(
                    lambda sent: send(client, sent, DEADLINE_SECONDS), some.values()
                )
                for number, outcome in zip(some, list(outcomes), strict=True):
                    yield {"number": number, **row_of(some[number], outcome)}
                server.wait_until_idle()
                if counts:
                    passes, steps = (
                        late - early for early, late in zip(before, counters(server), strict=True)
                    )
                    yield {"group": numbers[first], "passes": passes, "steps": steps}


def record_requests(num_requests: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of all servers, an equal part of the requests each."""
    found = {}
    share = num_requests // (len(CHECKPOINTS) * len(ORDERS))
    for family, checkpoint in CHECKPOINTS.items():
        images = family == "DiffusionGemma"
        for index, (order, option) in enumerate(ORDERS.items()):
            options = [option, "--max-model-len", "512", "--max-num-seqs", "64"]
            options += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(2**28)]
            if images:
                options += [*PARSERS, "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
            log = folder / f"{family}-{order}.log"
            server = start_server(shipped_checkpoint(checkpoint), log, *options)
            try:
                served = describe(server, images=images)
                if not images:
                    served = dataclasses.replace(served, canvas_length=SDAR_CANVAS_LENGTH)
                numbers = range(index * share, (index + 1) * share)
                rows = list(record_server(server, served, numbers, family))
                found[f"{family} {order}"] = rows
                if any(str(row.get("status")).startswith("5") for row in rows):
                    said = log.read_text(errors="replace").splitlines()
                    print(*(line for line in said if " ERROR " in line), sep="\n")
            finally:
                stop_server(server)
    return found


def usages(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    """Every command that runs something, and its usage."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield name, parser.format_help()
    for action in nested:
        for own, below in action.choices.items():
            yield from usages(below, f"{name} {own}")


def record_commands() -> dict[str, str]:
    """Return the usage of each command; `test_cli_values.py` has the refused command lines."""
    return dict(usages(build_parser(), "vllm-diffusion"))


class RaisedMessages:
    """A pytest plugin that keeps every message which a test expects to be raised."""

    def __init__(self) -> None:
        self.messages: set[str] = set()

    @pytest.hookimpl
    def pytest_configure(self) -> None:
        stock, messages = pytest.RaisesExc.__exit__, self.messages

        def keeping(this: Any, *raised: Any) -> Any:
            if raised[1] is not None:
                messages.add(f"{type(raised[1]).__name__}: {without_variables(str(raised[1]))}")
            return stock(this, *raised)

        pytest.RaisesExc.__exit__ = keeping  # type: ignore[method-assign]


def record_refusals() -> list[str]:
    """Messages that tests expect to be raised, sorted."""
    plugin = RaisedMessages()
    # Captured output of tests would be printed among the recording's own.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main(
            ["-q", "-m", "not slow", "-p", "no:cacheprovider", *REFUSAL_TESTS], [plugin]
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the tests that raise ended with {code}")
    return sorted(plugin.messages)


def lines_of(part: Any) -> list[str]:
    """One line for each thing that was recorded in a part."""
    if isinstance(part, dict):
        return [
            f"{name}: {json.dumps(row, ensure_ascii=False)}"
            for name, rows in part.items()
            for row in (rows if rows and isinstance(rows[0], dict) else [rows])
        ]
    return [str(line) for line in part]


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs side by side; the number of lines that do."""
    num_different = 0
    for name in before.keys() | after.keys():
        old, new = lines_of(before.get(name, [])), lines_of(after.get(name, []))
        table = Table("before", "after", title=name, show_lines=True)
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
            if tag != "equal":
                num_different += max(i2 - i1, j2 - j1)
                table.add_row("\n".join(old[i1:i2]), "\n".join(new[j1:j2]))
        if table.row_count:
            Console(width=200).print(table)
        print(f"{name}: {len(old)} lines before, {len(new)} after")
    return num_different


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; exit status 1 where recordings differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, help="the file to write a recording to")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of all servers")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("requests", "commands", "refusals"),
        default=("requests", "commands", "refusals"),
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    chosen = parser.parse_args(arguments)
    if chosen.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in chosen.compare)
        return int(compare(before, after) > 0)
    if chosen.write is None:
        parser.error("--write FILE, or --compare BEFORE AFTER")
    makers = {
        "requests": lambda folder: record_requests(chosen.requests, folder),
        "commands": lambda folder: record_commands(),
        "refusals": lambda folder: record_refusals(),
    }
    recording: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        for part in chosen.parts:
            recording[part] = makers[part](Path(folder))
            # After each part, since one takes minutes.
            chosen.write.write_text(json.dumps(recording, indent=0), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
