"""What excludes what in a request: one table of pairs of fields, and what a way cannot honour.

Each row names the field that a refusal names, what it cannot stand beside, and why. The
documentation prints the table (``docs/tables.py``). Values that do not fit one another, such as a
token of a pin that is not allowed, are checked in ``validation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import RULE
from vllm_diffusion.requests.arguments import PREFIX, RequestArguments
from vllm_diffusion.requests.bounds import Problem
from vllm_diffusion.requests.refusals import CONSTRAINT, clients_name

# Values of fields that change nothing, where it is not None or an empty list.
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
BOOST = f"{PREFIX}end_think_logit_boost"


@dataclass(frozen=True)
class Exclusion:
    """Two fields of which a request may have one.

    Attributes:
        field: The one that a refusal names.
        other: The other one.
        reason: Why, a clause about ``other``.
        where: Models of which it is true, in words; of all if empty.
        applies: Tells whether it is true of a model's canvases.
    """

    field: str
    other: str
    reason: str
    where: str = ""
    applies: Callable[[CanvasSpec], bool] = lambda spec: True

    @property
    def message(self) -> str:
        """What a refusal says after the field's name."""
        other = clients_name(self.other)
        return f"cannot be combined with {other}, {self.reason}; leave one of them out."


def _beside(other: str, reason: str, *fields: str, **where: Any) -> list[Exclusion]:
    return [Exclusion(field, other, reason, **where) for field in fields]


_CONSTRAINTS = (CONSTRAINT, "bad_words", "thinking_token_budget")
_MASKED: dict[str, Any] = {
    "where": "models with a mask token",
    "applies": lambda spec: spec.marks_undecided,
}
EXCLUSIONS: tuple[Exclusion, ...] = (
    *_beside(
        "structured_outputs", "which decides where the answer ends", "min_tokens", "ignore_eos"
    ),
    *_beside(
        "prediction",
        "from which the canvases start",
        *("suffix", "diffusion_seed_canvas", "diffusion_read_only"),
    ),
    *_beside("prediction", "whose tokens no step decides", "logprobs", **_MASKED),
    *_beside("diffusion_seed_canvas", "whose tokens no step decides", "logprobs", **_MASKED),
    *_beside(
        "suffix",
        "before which the answer has a fixed length",
        *("diffusion_seed_canvas", "diffusion_read_only", "diffusion_constrained"),
        *("diffusion_canvas_length", *_CONSTRAINTS),
    ),
    *(
        row
        for constraint in _CONSTRAINTS
        for row in _beside(
            constraint,
            "which needs a canvas that is free to follow it",
            *("diffusion_read_only", "diffusion_constrained"),
        )
    ),
    *_beside(
        "diffusion_read_only",
        "which reads a canvas and keeps nothing of it",
        *("diffusion_step_map", "diffusion_trace"),
    ),
    *_beside(
        BOOST,
        "which changes the same logits",
        *("logit_bias", "allowed_token_ids", "min_tokens"),
    ),
)


def asked(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> dict[str, Any]:
    """Return what a request has set of the fields in the table, by the client's names; an unset
    field is false.

    Args:
        params: ``SamplingParams``.
        arguments: Its arguments about canvases.
        spec: Description of the server's canvases.
    """
    return {
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "logprobs": params.logprobs is not None or bool(params.logprob_token_ids),
        "structured_outputs": params.structured_outputs is not None,
        "bad_words": params.bad_words,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "suffix": arguments.suffix,
        "prediction": bool(arguments.prediction or arguments.predicts_prompt),
        "diffusion_seed_canvas": arguments.seed_canvas is not None,
        "diffusion_read_only": arguments.read_only,
        "diffusion_constrained": arguments.allowed_ids is not None,
        "diffusion_canvas_length": arguments.canvas_length,
        "diffusion_step_map": arguments.shown.step_map,
        "diffusion_trace": arguments.shown.trace,
        BOOST: boosts_end(arguments, spec),
    }


def excluded(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> Iterator[Problem]:
    """Find the pairs of a request that exclude one another, and what its way cannot honour.

    Args:
        params: ``SamplingParams``, which vLLM has checked.
        arguments: Its arguments about canvases.
        spec: Description of the server's canvases.
    """
    yield from _refused_by_way(params, arguments, spec)
    has = asked(params, arguments, spec)
    for row in EXCLUSIONS:
        if has[row.field] and has[row.other] and row.applies(spec):
            # A constraint is an object of Python's by now, and tokens are a client's text.
            value = has[row.field] if row.field in ("min_tokens", "ignore_eos") else None
            yield row.field, row.message, value


def _refused_by_way(
    params: Any, arguments: RequestArguments, spec: CanvasSpec
) -> Iterator[Problem]:
    """Find what the request's way cannot honour, where another one of the server may."""
    way, chooses = spec.ways[arguments.way], spec.way_names is not None
    remedy = f'leave it out, or choose another {PREFIX}{RULE} than "{way.name}".'
    for field, reason in way.refused_fields.items():
        value = getattr(params, field)
        if value in (None, [], _NEUTRAL.get(field)):
            continue
        if chooses:
            reason = f"needs tokens that are not known yet where one is drawn: {remedy}"
        # What is sent as tools is a long grammar by now.
        yield field, reason, None if field == CONSTRAINT else value
    refused = dict(spec.refused_arguments(way))
    if chooses:
        no_effect = f"has no effect on an answer: {remedy}"
        steers = {*spec.rule_settings} - {*way.rule.settings}
        steers |= {"preset"} if spec.presets and not way.rule.presets else set()
        refused = dict.fromkeys((*refused, *steers), no_effect)
    for name, value in (params.extra_args or {}).items():
        own = name.removeprefix(PREFIX)
        is_set = bool(value) or (value is not None and own in spec.rule_settings)
        if not is_set or not name.startswith(PREFIX) or own == RULE:
            continue
        if not way.denoises:
            # Its canvases have one position, as is written where parameters are used again.
            refused = {own: f"has no effect on an answer: {remedy}"}
            refused = {} if (own, value) == ("canvas_length", 1) else refused
        if own in refused:
            yield field_of(own, value), refused[own], value


def boosts_end(arguments: RequestArguments, spec: CanvasSpec) -> bool:
    """Return true if a request has the end of its thought made likelier."""
    settings = spec.all_settings(arguments.settings)
    return bool(settings.get(BOOST.removeprefix(PREFIX)))


def field_of(name: str, value: Any) -> str:
    """Return the field in which a client has sent an argument, given without its prefix."""
    # OpenAI's prediction is an object.
    is_openai = name == "suffix" or (name == "prediction" and isinstance(value, Mapping))
    return name if is_openai else PREFIX + name
