"""A server's endpoint objects get this package's classes before the server answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers.hf import HfRenderer

from vllm_diffusion.live import http
from vllm_diffusion.requests.http import BoundedPrompts


class Stock:
    def answer(self) -> str:
        return "stock"


class Ours(Stock):
    def answer(self) -> str:
        return f"ours of {super().answer()}"


def test_objects_keep_their_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint object keeps its identity with its new class, and a missing one stays None."""
    served = Stock()
    state: Any = SimpleNamespace(served=served, left_out=None)
    seen: list[Any] = []

    async def stock(engine_client: Any, state: Any, args: Any) -> None:
        seen.append((engine_client, state.served.answer(), args))

    monkeypatch.setattr(http, "_stream_whole_answers", lambda served: None)
    monkeypatch.setattr(http, "ENDPOINTS", dict.fromkeys(("served", "left_out", "unknown"), Ours))
    # Of a model without canvases.
    renderer = HfRenderer.__new__(HfRenderer)
    client = SimpleNamespace(model_config=SimpleNamespace(), renderer=renderer)
    asyncio.run(http._serving_canvases.make(stock)(client, state, "args"))
    assert state.served is served
    # It bounds text of every model.
    assert isinstance(renderer, BoundedPrompts)
    assert state.left_out is None
    assert not hasattr(state, "unknown")
    assert seen == [(client, "ours of stock", "args")]
