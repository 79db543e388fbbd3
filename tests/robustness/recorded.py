"""Records what the product answers, so that a refactoring can be compared with it.

    python -m tests.robustness.recorded --write before.json
    python -m tests.robustness.recorded --write after.json
    python -m tests.robustness.recorded --compare before.json after.json

The requests are those of a campaign (``requests.py``) at servers of DiffusionGemma and SDAR in both
orders of passes: status, refused field, message, answer with its token ids, and how many passes and
denoising steps each group of them took. The comparison prints what differs side by side; paths,
ports and seconds are left out. ``python -m tests.support.messages`` lists every message.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.pairs.answers import bodies_of, choices_of
from tests.robustness.campaign import describe, send_all
from tests.robustness.client import Outcome, answers
from tests.robustness.requests import CHAT, COMPLETIONS, Request, Served, draw_request
from tests.support.engines.server import PARSERS, Server, start_server
from vllm_diffusion.checkpoints import shipped_checkpoint

REQUESTS = 2000
SEED = 27
# Requests whose passes are counted together. The order in which they arrive decides nothing: no
# prefix is cached, none is preempted, none waits for another.
GROUP = 25
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
    token_ids = [one.ids for one in choices_of(bodies_of(outcome.text))]
    content = json.dumps([said, token_ids])
    return row | {
        "text": said[0][0][:40] if said else "",
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
            outcomes = send_all(server, [*some.values()])
            for number, outcome in zip(some, outcomes, strict=True):
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
            with start_server(shipped_checkpoint(checkpoint), log, *options) as server:
                served = describe(server, images=images)
                if not images:
                    served = dataclasses.replace(served, canvas_length=SDAR_CANVAS_LENGTH)
                numbers = range(index * share, (index + 1) * share)
                rows = list(record_server(server, served, numbers, family))
            found[f"{family} {order}"] = rows
            if any(str(row.get("status")).startswith("5") for row in rows):
                said = log.read_text(errors="replace").splitlines()
                print(*(line for line in said if " ERROR " in line), sep="\n")
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs side by side; the number of lines that do."""
    num_different = 0
    for name in before.keys() | after.keys():
        old, new = (
            [json.dumps(row, ensure_ascii=False) for row in recording.get(name, [])]
            for recording in (before, after)
        )
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
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    chosen = parser.parse_args(arguments)
    if chosen.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in chosen.compare)
        return int(compare(before, after) > 0)
    if chosen.write is None:
        parser.error("--write FILE, or --compare BEFORE AFTER")
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        recording = record_requests(chosen.requests, Path(folder))
    chosen.write.write_text(json.dumps(recording, indent=0), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
