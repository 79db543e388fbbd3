"""The command that runs the slow tests forgets no test, and takes no old outcome for a new one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import slow

TESTS = [
    f"tests/test_it.py::test_{name}" for name in ("passes", "fails", "cleans_up_badly", "waits")
]


def end_test(name: str, **outcomes: str) -> None:
    for when in ("setup", "call", "teardown"):
        report: Any = SimpleNamespace(
            nodeid=name, when=when, outcome=outcomes.get(when, "passed"), duration=1.0
        )
        slow.pytest_runtest_logreport(report)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the four tests have ended in the tree "new"."""
    monkeypatch.setattr(slow, "STATE", tmp_path / "cache" / "slow.json")
    monkeypatch.setattr(slow, "read_tree", lambda: "new")
    passes, fails, cleans_up_badly, _ = TESTS
    end_test(passes)
    end_test(fails, call="failed")
    end_test(cleans_up_badly, teardown="failed")


@pytest.mark.usefixtures("ended")
def test_what_waits() -> None:
    """What failed, in its call or after it, runs again, and so does everything in another tree."""
    outcomes = slow.read_outcomes()
    assert slow.waiting(TESTS, outcomes, "new") == TESTS[1:]
    assert slow.waiting(TESTS, outcomes, "newer") == TESTS


@pytest.mark.usefixtures("ended")
def test_state_names_what_has_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert slow.print_state(TESTS, "new") == TESTS[1:]
    printed = capsys.readouterr().out.splitlines()
    assert f"not run  {TESTS[3]}" in printed
    assert f"failed   {TESTS[1]} (3 s)" in printed
    assert not any(TESTS[0] in line for line in printed)


def test_uncommitted_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome never counts for a commit that lacks what ran."""
    monkeypatch.setattr(slow, "_git", lambda *arguments: " M tests/conftest.py")
    with pytest.raises(SystemExit, match="commit first"):
        slow.read_tree.__wrapped__()
