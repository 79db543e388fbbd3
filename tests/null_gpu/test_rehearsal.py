"""The rehearsal's cases, its data and its comparison; the cases themselves run by its own command."""

from __future__ import annotations

import json

import pytest

from tests.null_gpu import rehearsal
from tests.null_gpu.rehearsal_cases import cases


def test_names():
    """No two cases share one, and the data has no row that nothing makes any more."""
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert set(json.loads(rehearsal.DATA.read_text())) <= set(names)


@pytest.mark.parametrize(
    ("found", "printed"),
    [
        ({"bytes": {"weights": 5}, "starts": True}, []),
        ({"bytes": {"weights": 6}, "starts": True}, ["bytes: weights: 5 -> 6"]),
        ({"bytes": {"weights": 5}, "starts": False}, ["starts: True -> False"]),
        ({"bytes": {}, "starts": True}, ["bytes: weights: 5 -> None"]),
    ],
)
def test_differences(found, printed):
    assert rehearsal.differences({"bytes": {"weights": 5}, "starts": True}, found) == printed
