"""The house does not grow, or become more entangled, without a reason beside the figure."""

from __future__ import annotations

import pytest

from tests.support.house import FIGURES, Recorded, main, read_record, risen


def test_no_figure_rises() -> None:
    """``python -m tests.support.house`` prints the table, and says how a rise is recorded."""
    measured = {name: figure.count() for name, figure in FIGURES.items()}
    known = read_record()
    assert known.keys() == FIGURES.keys()
    above = {name: (known[name].value, measured[name]) for name in risen(measured, known)}
    assert not above, "figures above tests/house.json; see tests/support/house.py"


def test_risen() -> None:
    """A figure above its record is found, one below it or reported only is not."""
    known = {
        "README words": Recorded(100),
        "largest file": Recorded(100),
        "all lines of the package": Recorded(100),
    }
    measured = {"README words": 101.0, "largest file": 99.0, "all lines of the package": 200.0}
    assert risen(measured, known) == ["README words"]


def test_rise_needs_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recording a figure that rose is refused by its name."""
    known = {name: Recorded(0) for name in FIGURES}
    monkeypatch.setattr("tests.support.house.read_record", lambda: known)
    monkeypatch.setattr("tests.support.house.write_record", lambda figures: pytest.fail("written"))
    assert main(["--record", "--reason", "largest file: a test"]) == 1
    message = capsys.readouterr().err
    assert "README words" in message
    assert "largest file" not in message
