"""Fixtures of the tests of drafts."""

from typing import Any

import pytest

from tests.support.models import drafts


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    """The random targets, as ``transformers`` models."""
    return {kind: drafts.target_model(kind) for kind in drafts.TARGETS}
