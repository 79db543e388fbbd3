"""Start everything that is served on the null GPU, with pytest, which collects this file by name.

    pytest tests/null_gpu/rehearsal.py                     # what has not passed with these sources
    pytest tests/null_gpu/rehearsal.py --collect-only -q   # prints all cases
    pytest tests/null_gpu/rehearsal.py -k "draft or 26B"   # those whose names hold one of these
    UPDATE_BASELINES=1 pytest tests/null_gpu/rehearsal.py  # records what is found

A case passes when its engine starts, its requests get through, and what it chose, took and asked of
the driver is what ``rehearsal.json`` says; a case that differs is started once more. Kernels
compute nothing there: nothing of this says that an answer is right, or how long it takes.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.null_gpu.rehearsal_cases import Case, cases
from tests.support.null_gpu.processes import ROOT, NullGpu, Outcome

SECONDS = 900
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3 * SECONDS)]

DATA = Path(__file__).with_name("rehearsal.json")
SOURCES = ("vllm_diffusion", "attention_kernels", "tests/null_gpu", "tests/support/null_gpu")


def sources_key() -> str:
    """Return a key of every source that a case could run."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


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


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process for the cases of one capability; one at a time holds all that vLLM imports."""
    folder, caches = tmp_path_factory.mktemp("rehearsal"), request.config.cache.mkdir("null_gpu")
    with pytest.MonkeyPatch.context() as patched:
        # What vLLM says that it chose is recorded.
        patched.setenv("VLLM_LOGGING_LEVEL", "INFO")
        with NullGpu(folder, imports="vllm", caches=caches, capability=request.param) as running:
            yield running


@pytest.mark.parametrize(
    ("gpu", "case"),
    [pytest.param(case.capability, case, id=case.name) for case in cases()],
    indirect=["gpu"],
)
def test_start(
    gpu: NullGpu, case: Case, request: pytest.FixtureRequest, tmp_path_factory: Any
) -> None:
    """A start chooses, takes and asks of the driver what is recorded."""
    key, passed = sources_key(), request.config.cache.get("null_gpu/passed", {})
    if passed.get(case.name) == key:
        pytest.skip("has passed with these sources")
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    # Compiling changes which memory graphs keep, so a start that finds all compiled counts.
    for _ in range(2):
        outcome = gpu.run(
            case.run,
            capability=case.capability,
            gib=case.gib,
            seconds=SECONDS,
            variables=case.variables,
            **case.arguments(tmp_path_factory.mktemp("model")),
        )
        found = found_by(outcome)
        if found == recorded.get(case.name):
            break
    is_refused = case.refusal is not None and case.refusal in found.get("error", "")
    if os.environ.get("UPDATE_BASELINES") == "1" and (found["starts"] or is_refused):
        recorded[case.name] = found
        text = json.dumps(recorded, indent=1, sort_keys=True)
        DATA.write_text(text + "\n", encoding="utf-8")
    assert found == recorded.get(case.name), outcome.log
    request.config.cache.set("null_gpu/passed", passed | {case.name: key})
