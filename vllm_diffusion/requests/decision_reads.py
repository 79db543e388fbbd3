"""Group of the reads of one decision, so that one pass answers all of them.

vLLM's ``/v1/decisions`` sends a request for each question, or for each canvas of questions. They reach the
engine one after another, and an idle one would begin with the first alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests.arguments import READ_GROUP


def install() -> None:
    """Group the reads of a decision, for diffusion models that are ours. Safe to call twice."""
    _grouped.install()


@replaces_call(
    "vllm.entrypoints.openai.decisions.strategies:next_token_label_reads",
    reason="Reads of one decision say that they belong together, so that one pass answers them.",
    until="Requests of one decision carry an id of the decision and their number.",
)
async def _grouped(
    stock: Any,
    engine_client: Any,
    engine_inputs: Sequence[Any],
    sampling_params: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    config = engine_client.vllm_config
    # Of several engines each gets some of them.
    is_one_engine = config.parallel_config.data_parallel_size == 1
    if is_one_engine and hasattr(config.model_config, "canvas_spec"):
        group = [uuid.uuid4().hex, len(sampling_params)]
        for params in sampling_params:
            params.extra_args = {**(params.extra_args or {}), READ_GROUP: group}
    return await stock(engine_client, engine_inputs, sampling_params, *args, **kwargs)
