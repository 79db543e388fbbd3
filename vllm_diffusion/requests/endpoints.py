"""Objects behind the endpoints of vLLM's server, with the classes that diffusion models need.

vLLM's server keeps one object for each endpoint. Before the server answers its first request, each of
them is given a subclass of ours, which checks more and sends more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call


def install(classes: Mapping[str, type]) -> None:
    """Serve the endpoints of this process with classes of ours. Safe to call twice.

    Args:
        classes: Subclasses of the classes of vLLM's objects, by the object's name in the server's state.
    """
    _serving_canvases.install(classes)


@replaces_call(
    "vllm.entrypoints.launchers.api_server.app_state:init_endpoint_plugins_state",
    reason="Gives the objects behind vLLM's endpoints subclasses of ours, once the server has them.",
    until="A plugin may name the classes of the server's objects, or of an endpoint plugin without VLLM_PLUGINS.",
)
async def _serving_canvases(
    stock: Any, classes: Mapping[str, type], engine_client: Any, state: Any, args: Any
) -> None:
    for name, cls in classes.items():
        served = getattr(state, name, None)
        # What the server does not offer is None. Other objects of the server hold this one, so it
        # stays the same object.
        if served is not None:
            served.__class__ = cls
    await stock(engine_client, state, args)
