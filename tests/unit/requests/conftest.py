"""What tests of requests share."""

from collections.abc import Iterator

import pytest

from vllm_diffusion.requests import refusals


@pytest.fixture(autouse=True)
def _forget_constraint() -> Iterator[None]:
    """Undo that a test notes the field of a constraint, by which later refusals name it."""
    token = refusals._constrained_by.set(refusals.CONSTRAINT)
    yield
    refusals._constrained_by.reset(token)
