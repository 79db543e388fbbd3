"""Facts about a request's canvases that follow from its ``SamplingParams``."""

from __future__ import annotations

from typing import Any


def constraining_fields(params: Any) -> list[str]:
    """Return the names of the fields of ``SamplingParams`` that constrain a request's canvases."""
    structured = params.structured_outputs
    fields = {
        "structured_outputs": structured is not None and not structured.all_constraints_none(),
        "bad_words": bool(params.bad_words_token_ids),
        "thinking_token_budget": (
            params.thinking_token_budget is not None and params.thinking_token_budget >= 0
        ),
    }
    return [name for name, is_set in fields.items() if is_set]


def end_token_ids(sampling_params: Any) -> list[int]:
    """Return the tokens that end a request: its own, and the model's unless it ignores them."""
    ends = list(sampling_params.stop_token_ids or ())
    if sampling_params.eos_token_id is not None:
        ends.append(sampling_params.eos_token_id)
    return ends
