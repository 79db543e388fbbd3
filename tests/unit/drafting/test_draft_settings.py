"""``--additional-config '{"drafting": {...}}'``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.drafting.draft_settings import DraftSettings, draft_settings


def parsed(section: Any) -> DraftSettings:
    config: Any = SimpleNamespace(additional_config={"drafting": section})
    return draft_settings(config)


@pytest.mark.parametrize("additional", [{}, {"diffusion": {}}, None])
def test_nothing_is_one_pass(additional: Any) -> None:
    config: Any = SimpleNamespace(additional_config=additional)
    assert draft_settings(config) == parsed({}) == DraftSettings(steps=1, window=None)
    assert parsed({}).unmask_counts(7) == (7,)


def test_settings_are_read() -> None:
    section = {"steps": 3, "schedule": "linear", "order": "position", "window": 64}
    assert parsed(section) == DraftSettings(**section)
    assert parsed(section).unmask_counts(7) == (2, 3, 2)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([], r"drafting must be a mapping; got \[\]"),
        ({"passes": 2}, "'passes' is not a setting of drafts; these are steps, schedule, order"),
        ({"steps": 0}, "steps=0 must be an integer of at least 1"),
        ({"steps": True}, "steps=True must be an integer"),
        ({"steps": None}, "steps=None must be an integer"),
        ({"steps": "2"}, "steps='2' must be an integer"),
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"window": 1.5}, "window=1.5 must be an integer"),
        (
            {"order": "random"},
            'order=\'random\' is not known; set it to "confidence" or "position"',
        ),
        ({"order": ["position"]}, "order=.* is not known"),
        ({"schedule": {}}, 'schedule={} is not known; set it to "cosine" or "linear" or "sqrt"'),
        ({"reveals": "sampled"}, 'reveals="sampled" is not served: .* leave reveals out'),
        ({"record": "here"}, "record='here' must be a mapping"),
        ({"record": {"max_mib": 3}}, 'must be a mapping with "folder"'),
        (
            {"record": {"folder": "r", "max_gib": 3}},
            "record has no setting 'max_gib'; it has folder, max_mib",
        ),
        ({"record": {"folder": 3}}, "record.folder=3 must be the path of a folder"),
        ({"record": {"folder": ""}}, "record.folder='' must be the path"),
        ({"record": {"folder": "r", "max_mib": 0}}, "record.max_mib=0 must be an integer"),
        ({"record": {"folder": "r", "max_mib": True}}, "record.max_mib=True must be"),
        ({"reveals": "greedy"}, "reveals='greedy' is not known; set it to \"likeliest\""),
    ],
)
def test_what_is_not_understood_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^--additional-config .*{message}"):
        parsed(section)
