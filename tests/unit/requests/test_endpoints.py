"""Objects of a server get classes of ours before it answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_diffusion.requests.endpoints import _serving_canvases


class Stock:
    def answer(self) -> str:
        return "stock"


class Ours(Stock):
    def answer(self) -> str:
        return f"ours of {super().answer()}"


def test_objects_keep_their_identity() -> None:
    """Who holds an object already sees its new class; what is not served stays None, and vLLM goes on."""
    served = Stock()
    state: Any = SimpleNamespace(served=served, left_out=None)
    seen: list[Any] = []

    async def stock(engine_client: Any, state: Any, args: Any) -> None:
        seen.append((engine_client, state.served.answer(), args))

    init = _serving_canvases.make(stock, {"served": Ours, "left_out": Ours, "unknown": Ours})
    asyncio.run(init("client", state, "args"))
    assert state.served is served
    assert state.left_out is None
    assert not hasattr(state, "unknown")
    assert seen == [("client", "ours of stock", "args")]
