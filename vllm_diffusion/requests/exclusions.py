"""What excludes what in a request: one table of pairs of fields, and what a way cannot honour.

Each row names the field that a refusal names, what it cannot stand beside, and why. The
documentation prints the table (``docs/tables.py``). Values that do not fit one another, such as a
token of a pin that is not allowed, are checked in ``validation.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import RULE
from vllm_diffusion.requests.arguments import BOOST, PREFIX
from vllm_diffusion.requests.bounds import Problem
from vllm_diffusion.requests.checked_request import CheckedRequest
from vllm_diffusion.requests.refusals import CONSTRAINT, clients_name
from vllm_diffusion.requests.texts import field_of

# Log-probabilities are kept until their tokens are emitted: this bounds the room for each position
# of each request's canvas, as wide as the widest request. A pass reports at most as many.
MOST_LOGPROBS_BYTES = 2**30
# A token id of 64 bits, and a float32.
_BYTES_A_LOGPROB = 12
# Values of fields that change nothing, where it is not None or an empty list.
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


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


def asked(request: CheckedRequest) -> dict[str, Any]:
    """Return what a request has set of the fields in the table, by the client's names; an unset
    field is false.
    """
    params, arguments = request.params, request.arguments
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
        BOOST: arguments.thought_end,
    }


def excluded(request: CheckedRequest) -> Iterator[Problem]:
    """Find what a request must not ask for: beside something else, in its way, or on this
    server.
    """
    yield from _refused_by_server(request)
    yield from _refused_by_way(request)
    yield from _pairs(request)
    yield from _unfit_values(request)


def _pairs(request: CheckedRequest) -> Iterator[Problem]:
    """Find the pairs of the table."""
    has = asked(request)
    for row in EXCLUSIONS:
        if has[row.field] and has[row.other] and row.applies(request.spec):
            # A constraint is an object of Python's by now, and tokens are a client's text.
            value = has[row.field] if row.field in ("min_tokens", "ignore_eos") else None
            yield row.field, row.message, value


def _refused_by_way(request: CheckedRequest) -> Iterator[Problem]:
    """Find what the request's way cannot honour, where another one of the server may."""
    params, spec, way = request.params, request.spec, request.way
    chooses = spec.way_names is not None
    remedy = f'leave it out, or choose another {PREFIX}{RULE} than "{way.name}".'
    for field, reason in way.refused_fields.items():
        value = getattr(params, field)
        if value in (None, [], _NEUTRAL.get(field)):
            continue
        if chooses:
            reason = f"is not supported in this way of decoding, which draws several tokens at once: {remedy}"
        # What is sent as tools is a long grammar by now.
        yield field, reason, None if field == CONSTRAINT else value
    refused, known = dict(spec.refused_arguments(way)), spec.rule_settings
    if chooses:
        no_effect = f"has no effect on an answer: {remedy}"
        steers = {*known} - {*way.rule.settings}
        steers |= {"preset"} if spec.presets and not way.rule.presets else set()
        refused = dict.fromkeys((*refused, *steers), no_effect)
    for name, value in (params.extra_args or {}).items():
        own = name.removeprefix(PREFIX)
        is_set = bool(value) or (value is not None and own in known)
        if not is_set or not name.startswith(PREFIX) or own == RULE:
            continue
        if not way.denoises:
            # Its canvases have one position, as is written where parameters are used again.
            refused = {own: f"has no effect on an answer: {remedy}"}
            refused = {} if (own, value) == ("canvas_length", 1) else refused
        if own in refused:
            yield field_of(own, value), refused[own], value


def _refused_by_server(request: CheckedRequest) -> Iterator[Problem]:
    """Find what a server has no means for, and what its model's blocks have no room for."""
    thoughts = request.processor.vllm_config.reasoning_config
    budget = request.params.thinking_token_budget
    # vLLM refuses it too, but within a stream and without the field.
    if budget is not None and not (thoughts and thoughts.enabled):
        reason = (
            "needs to know where thoughts end: start the server with --reasoning-parser or "
            "--reasoning-config, or leave it out."
        )
        yield "thinking_token_budget", reason, budget
    yield from _logprobs(request)
    yield from _blocks(request)


def _unfit_values(request: CheckedRequest) -> Iterator[Problem]:
    """Find values that do not fit one another, or the request's own canvas."""
    params, arguments = request.params, request.arguments
    if problem := request.way.rule.contradiction(request.settings):
        # Its settings contradict one another, or the server's for those that are left out.
        names, reason = problem
        name = next(name for name in names if name in arguments.settings)
        yield PREFIX + name, f"contradicts its other settings: {reason}.", None
    allowed, brought = params.allowed_token_ids, arguments.seed_canvas or ()
    ends = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
    if params.min_tokens > 0 and allowed and ends.issuperset(allowed):
        reason = (
            "holds only tokens that end the request, which min_tokens forbids at first; allow "
            "others, or leave min_tokens out."
        )
        yield "allowed_token_ids", reason, allowed
    for position in arguments.pinned if allowed is not None else ():
        if brought[position] not in allowed:
            reason = (
                f"holds token {brought[position]} at position {position}, which allowed_token_ids "
                "does not list; add it there, or leave the position out."
            )
            yield "diffusion_pinned", reason, None
    most = min(params.max_tokens or request.width, request.width)
    if arguments.read_only and params.min_tokens > most:
        reason = (
            f"must be at most {most}, the tokens that diffusion_read_only reads; got "
            f"{params.min_tokens}. Lower it, or leave it out."
        )
        yield "min_tokens", reason, params.min_tokens


def _logprobs(request: CheckedRequest) -> Iterator[Problem]:
    """Find more log-probabilities than the server has memory for until their tokens are emitted."""
    sent, width = request.params.logprobs, request.spec.length
    num_slots = request.processor.scheduler_config.max_num_seqs
    num_top = sent or 0
    if num_top < 0:
        num_top = request.processor.model_config.get_vocab_size()
    # Besides the likeliest tokens there is the position's own.
    most = MOST_LOGPROBS_BYTES // (_BYTES_A_LOGPROB * num_slots * width) - 1
    if num_top > most:
        reason = (
            f"(top_logprobs) may be at most {most} on this server, which keeps them for {num_slots} "
            f"canvases of {width} tokens in {MOST_LOGPROBS_BYTES // 2**20} MiB; got "
            f"{sent}. Lower it, or start the server with a lower --max-num-seqs."
        )
        yield "logprobs", reason, sent


def _blocks(request: CheckedRequest) -> Iterator[Problem]:
    """Find an answer of no whole blocks in a request that names their length, as LLaDA's loop
    refuses it.

    An answer of all that the model has room for is vLLM's default: the request did not set that
    length.
    """
    length, max_tokens = request.arguments.settings.get("block_length"), request.params.max_tokens
    most = request.processor.model_config.max_model_len - request.num_prompt
    if length is None or max_tokens is None or max_tokens >= most:
        return
    if request.spec.layout.has_whole_blocks and max_tokens % int(length):
        reason = (
            f"must be a multiple of diffusion_block_length, {length}; got {max_tokens}. Leave diffusion_block_length "
            "out for an answer that is cut."
        )
        yield "max_tokens", reason, max_tokens
