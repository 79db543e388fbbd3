"""Start everything that is served on the null GPU, and go on where an earlier run stopped.

    python -m tests.null_gpu.rehearsal             # runs what has not passed since the code changed
    python -m tests.null_gpu.rehearsal --list      # prints it
    python -m tests.null_gpu.rehearsal --only draft 26B  # those whose names hold one of these
    python -m tests.null_gpu.rehearsal --record    # writes what was found to rehearsal.json

A case passes when its engine starts, its requests get through, and what it chose, took and asked of
the driver is what ``rehearsal.json`` says; a case that differs is started once more. What differs
then is printed, and accepted with ``--record``. Kernels compute nothing there: nothing of this says
that an answer is right, or how long it takes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.null_gpu.rehearsal_cases import Case, cases
from tests.support.null_gpu.build import missing
from tests.support.null_gpu.processes import ROOT, NullGpu, Outcome

DATA = Path(__file__).with_name("rehearsal.json")
STATE = Path(tempfile.gettempdir()) / "vllm-diffusion-rehearsal"
SOURCES = ("vllm_diffusion", "attention_kernels", "tests/null_gpu", "tests/support/null_gpu")
SECONDS = 900


def sources_key() -> str:
    """Return a key of every source that a case could run."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def differences(known: Any, found: Any, where: str = "") -> list[str]:
    """Return where two pieces of data differ, one line each."""
    if isinstance(known, dict) and isinstance(found, dict):
        return [
            line
            for key in sorted(known.keys() | found.keys())
            for line in differences(known.get(key), found.get(key), f"{where}{key}: ")
        ]
    return [] if known == found else [f"{where}{known} -> {found}"]


def run_case(gpu: NullGpu, case: Case) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return gpu.run(
            case.run,
            capability=case.capability,
            gib=case.gib,
            seconds=SECONDS,
            variables=case.variables,
            **case.arguments(Path(folder)),
        )


def kernels_in(log: str) -> list[str]:
    """Return vLLM's log lines of chosen implementations, without paths."""
    return sorted(
        set(re.findall(r"INFO .*?\] ((?:Using|Selected) [^\n/]{,120})(?:[^\n/]*)$", log, re.M))
    )


def found_by(outcome: Outcome) -> dict[str, Any]:
    """Return the facts of a case that are recorded, or the line that refused it."""
    if outcome.error is None:
        found = {"starts": True, "kernels": kernels_in(outcome.text()), **outcome.value}
        for name in ("kinds", "checked_kinds"):
            # Held by the tests.
            found.get("chosen", {}).pop(name, None)
        if "requests" in found:
            # How many passes they took means nothing where no canvas can converge.
            found["requests"] = sorted(found["requests"])
        return found
    # What a check of vLLM's configuration raises is wrapped.
    refusal = re.search(r"Value error, (.*) \[type=", outcome.error)
    return {
        "starts": False,
        "error": refusal[1] if refusal else outcome.error.splitlines()[0][:300],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print what has not passed")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts of the names of cases to run"
    )
    parser.add_argument("--record", action="store_true", help="keep what is found as the data")
    parser.add_argument(
        "--state", type=Path, default=STATE, help="folder of logs and of what passed"
    )
    arguments = parser.parse_args()
    lacks = missing()
    if lacks is not None:
        print(lacks, file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT / "benchmarks"))
    arguments.state.mkdir(parents=True, exist_ok=True)
    state_file = arguments.state / "passed.json"
    key = sources_key()
    passed = read_json(state_file)
    chosen = [case for part in arguments.only for case in cases() if part in case.name]
    # Each once, in the order in which they are requested.
    chosen = list({case.name: case for case in chosen}.values())
    waiting = [case for case in chosen if passed.get(case.name) != key]
    print(f"{len(waiting)} of {len(chosen)} cases have not passed with these sources")
    if arguments.list or not waiting:
        print("\n".join(case.name for case in waiting))
        return 0
    failed = 0
    capability = ""
    with contextlib.ExitStack() as process:
        for case in waiting:
            if case.capability != capability:
                # One at a time: each holds all that vLLM imports.
                process.close()
                capability = case.capability
                folder = arguments.state / capability
                folder.mkdir(exist_ok=True)
                gpu = NullGpu(
                    folder,
                    imports="vllm",
                    caches=arguments.state / "caches",
                    capability=capability,
                )
                process.enter_context(gpu)
            started = time.monotonic()
            known = read_json(DATA).get(case.name)
            outcome = run_case(gpu, case)
            if found_by(outcome) != known:
                # Compiling changes which memory graphs keep, so a start that finds all compiled
                # counts.
                outcome = run_case(gpu, case)
            found = found_by(outcome)
            refused = case.refusal is not None and case.refusal in found.get("error", "")
            if arguments.record and (found["starts"] or refused):
                known = found
                write_json(DATA, read_json(DATA) | {case.name: found})
            changed = differences(known, found)
            fate = "changed" if changed else "starts" if found["starts"] else "is refused"
            print(f"{case.name}: {fate} ({time.monotonic() - started:.0f} s)", flush=True)
            for line in changed[:20]:
                print(f"    {line}")
            if not found["starts"] or changed:
                print(f"    {found.get('error', '')}\n    log: {outcome.log}", flush=True)
            if changed:
                failed += 1
            else:
                passed[case.name] = key
                write_json(state_file, passed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
