"""The class of the workers is ours, or one that derives from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.startup.passes import choose_worker

pytestmark = pytest.mark.engine

OURS = "builtins.dict"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("auto", OURS), (OURS, OURS), ("collections.OrderedDict", "collections.OrderedDict")],
)
def test_choice(given: str, chosen: str) -> None:
    """Ours where the operator names none; a class that derives from ours stays."""
    config: Any = SimpleNamespace(worker_cls=given)
    choose_worker(config, OURS)
    assert config.worker_cls == chosen


def test_another_class() -> None:
    """Its model runner would sample logits: refused, with what to derive it from."""
    config: Any = SimpleNamespace(worker_cls="builtins.list")
    with pytest.raises(
        ValueError, match="--worker-cls builtins.list .* derive it from builtins.dict"
    ):
        choose_worker(config, OURS)
