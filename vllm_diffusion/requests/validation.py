"""Checks of a diffusion model's requests, in the API process.

They replace vLLM's: what our sampler honours is accepted, and what it cannot honour is a 400 that
names the field. Before them an endpoint has read the body (``http.py``); after them come the engine
and, for a transfer that does not fit, the scheduler.
"""

from __future__ import annotations

import contextlib
import copy
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import AUTOREGRESSIVE, RULE
from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.arguments import (
    MOST_PREDICTED,
    MOST_THOUGHT_END,
    PREFIX,
    PROMPT,
    RequestArguments,
    arguments_of,
    attach_arguments,
    check_room,
    parse_arguments,
    predicted_text,
    with_end_texts,
)
from vllm_diffusion.requests.bounds import Problem
from vllm_diffusion.requests.constraint import read_constraint
from vllm_diffusion.requests.greedy_filters import noted_filters
from vllm_diffusion.requests.refusals import failing_aloud, refuse
from vllm_diffusion.weights.adapters.early_checks import check_request

# Of log-probabilities that a server keeps until their tokens are emitted: room for each position of
# each request's canvas, as wide as the widest request. A pass reports at most as many.
MOST_LOGPROBS_BYTES = 2**30
# A token id of 64 bits, and a float32.
_BYTES_A_LOGPROB = 12
# What ends a thought, and the setting that makes it likelier.
THOUGHT_END = "</think>"
_BOOST = "end_think_logit_boost"
# Values of fields that change nothing, where it is not None or an empty list.
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def install() -> None:
    """Put our checks in place of vLLM's, for diffusion models only. Safe to call twice."""
    _checking_canvases.install()


@replaces_call(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    reason="Stock refuses temperature, seed, min_p and every constraint, which our sampler honours; believes pictures "
    "of a refused request to be with the engine; and lets an adapter end it that can no longer be loaded.",
    until="A model's configuration may name the sampling parameters that its sampler honours, and a worker that cannot "
    "load an adapter refuses the request and not the batch.",
)
def _checking_canvases(
    stock: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make an engine's request, with our checks in place of those that only diffusion models
    have.
    """
    from vllm.sampling_params import SamplingParams

    model_config = self.model_config
    plan = getattr(model_config, "diffusion", None)
    if plan is None or not isinstance(params, SamplingParams):
        return stock(self, request_id, prompt, params, *args, **kwargs)
    unaware = copy.copy(self)
    unaware.model_config = _NotDiffusion(model_config)
    # Constraints are checked here.
    unaware.structured_outputs_config = None
    unaware.generation_config_fields = with_end_texts(
        self.generation_config_fields, plan.spec, self.tokenizer
    )
    with giving_pictures_back(self.renderer, prompt):
        with failing_aloud():
            token_ids = (
                prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
            ) or ()
            # Both of vLLM's engines give it by name.
            check_request(kwargs.get("lora_request"), model_config)
            _check_vocabulary(token_ids, model_config.get_vocab_size())
            if plan.spec is None:
                _check_ordinary(params, self)
            else:
                check_params(params, self)
                _check_blocks(params, len(token_ids), model_config)
                _cut_suffix(params, len(token_ids), model_config)
                if arguments_of(params).predicts_prompt:
                    _check_predicted(len(token_ids))
        return stock(unaware, request_id, prompt, params, *args, **kwargs)


@contextlib.contextmanager
def giving_pictures_back(renderer: Any, prompt: Any) -> Iterator[None]:
    """Have a request that fails in the block leave no picture that is believed to be with the
    engine: the next request with the same picture would not send it.

    Args:
        renderer: vLLM's renderer, which keeps what was prepared.
        prompt: The request's prompt; rendered, it names its pictures.
    """
    try:
        yield
    # Also where the client has left.
    except BaseException:
        hashes = prompt.get("mm_hashes", {}) if isinstance(prompt, Mapping) else {}
        renderer.queue_mm_cache_invalidations(
            [mm_hash for of_kind in hashes.values() for mm_hash in of_kind]
        )
        raise


class _NotDiffusion:
    """A model's configuration that does not say that it is a diffusion model."""

    is_diffusion = False

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_config, name)


def check_params(params: Any, processor: Any) -> None:
    """Run vLLM's checks of what a request asks for, and ours of what its canvases can give.

    Args:
        params: The request's ``SamplingParams``. They get the struct of arguments that the engine
            reads, and their constraint is written as the engine follows it.
        processor: vLLM's ``InputProcessor`` of a diffusion model.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    model_config, tokenizer = processor.model_config, processor.tokenizer
    spec: CanvasSpec = model_config.diffusion.spec
    # First, so that ours read numbers and token ids of the vocabulary.
    params.verify(_NotDiffusion(model_config), processor.speculative_config, None, tokenizer)
    _refuse_first(chain(_ignored(params), _contradictions(params, spec), bounds.problems(params)))
    arguments = parse_arguments(
        params.extra_args,
        spec=spec,
        vocab_size=model_config.get_vocab_size(),
        logprob_token_ids=params.logprob_token_ids,
    )
    arguments = msgspec.structs.replace(
        arguments,
        suffix=_suffix(params, tokenizer, model_config),
        **_prediction(params, tokenizer, model_config),
    )
    thought_end = _thought_end(arguments, spec, tokenizer)
    num_slots = processor.scheduler_config.max_num_seqs
    _refuse_first(
        chain(
            _of_way(params, arguments, spec),
            _combinations(params, arguments, spec),
            _boosted(params, thought_end),
            _logprobs(params, model_config, num_slots),
        )
    )
    arguments = _narrowed(params, arguments, spec)
    attach_arguments(params, msgspec.structs.replace(arguments, thought_end=thought_end or ()))
    read_constraint(params.structured_outputs, processor.structured_outputs_config)


def _check_ordinary(params: Any, processor: Any) -> None:
    """Check what the autoregressive mode adds to vLLM's own checks: it has constraints of ours, and
    no canvas.
    """
    for name in params.extra_args or {}:
        if name.startswith(PREFIX):
            refuse(name, "has no effect here: the server answers token after token; leave it out.")
    read_constraint(params.structured_outputs, processor.structured_outputs_config)


def _refuse_first(problems: Iterator[Problem]) -> None:
    for field, reason, value in problems:
        refuse(field, reason, value)


def _ignored(params: Any) -> Iterator[Problem]:
    """Find what a canvas's sampler would ignore."""
    ignored = {
        "watermarking": bool(params.watermarking),
        "trace_decode_token_ids": params.trace_decode_token_ids is not None,
    }
    for field, is_set in ignored.items():
        if is_set:
            reason = (
                "is not supported for diffusion models, which draw a canvas at once and not "
                "token after token; leave it out."
            )
            yield field, reason, getattr(params, field)
    for name in ("ec_transfer_params", "kv_transfer_params"):
        # vLLM's protocol checks its own fields of these names, and not those within vllm_xargs.
        value = (params.extra_args or {}).get(name)
        if value is not None and not isinstance(value, Mapping):
            yield name, f"must be a mapping; got {reprlib.repr(value)}.", None


def _contradictions(params: Any, spec: CanvasSpec) -> Iterator[Problem]:
    """Find fields of vLLM's that exclude one another, or that this model's canvases cannot
    honour.
    """
    ends = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
    allowed = params.allowed_token_ids
    if params.min_tokens > 0 and allowed and ends.issuperset(allowed):
        reason = (
            "holds only tokens that end the request, which min_tokens forbids at first; allow "
            "others, or leave min_tokens out."
        )
        yield "allowed_token_ids", reason, allowed
    for field in ("min_tokens", "ignore_eos"):
        if params.structured_outputs is not None and getattr(params, field):
            reason = (
                "cannot be combined with a structured output, which decides where the answer ends; "
                "leave one of them out."
            )
            yield field, reason, getattr(params, field)
    for field, reason in spec.refused_fields().items():
        value = getattr(params, field)
        if value not in (None, [], _NEUTRAL.get(field)):
            yield field, reason, value
    for name, reason in spec.refused_arguments.items():
        if value := (params.extra_args or {}).get(PREFIX + name):
            yield _field_of(name, value), reason, value


def _of_way(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> Iterator[Problem]:
    """Find what the rule that a request chose cannot honour, where another rule of the server
    can.
    """
    chosen, way = spec.of_request(arguments.settings), spec.ways[spec.way(arguments.settings)]
    if chosen is spec:
        return
    remedy = f'leave it out, or choose another {PREFIX}{RULE} than "{way}".'
    for field in chosen.refused_fields():
        value = getattr(params, field)
        if value not in (None, [], _NEUTRAL.get(field)):
            problem = f"needs tokens that are not known yet where one is drawn: {remedy}"
            if field == "structured_outputs":
                # What is sent as tools is a long grammar by now.
                problem, value = f"(response_format, tools) {problem}", None
            yield field, problem, value
    steers = {*spec.rule.settings, "preset"} - {*chosen.rule.settings, RULE}
    steers.update(chosen.layout.refused_arguments)
    for name, value in (params.extra_args or {}).items():
        own = name.removeprefix(PREFIX)
        is_set = bool(value) or (value is not None and own in spec.rule.settings)
        if not (is_set and name.startswith(PREFIX)) or own == RULE:
            continue
        # Its canvases have one position, as is written where parameters are used again.
        is_refused = (
            (own, value) != ("canvas_length", 1) if way == AUTOREGRESSIVE else own in steers
        )
        if is_refused:
            yield _field_of(own, value), f"has no effect on an answer: {remedy}", value


def _field_of(name: str, value: Any) -> str:
    """Return the field in which a client has sent an argument, given without its prefix."""
    # OpenAI's prediction is an object.
    is_openai = name == "suffix" or (name == "prediction" and isinstance(value, Mapping))
    return name if is_openai else PREFIX + name


def _combinations(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> Iterator[Problem]:
    """Find what a request's own canvas leaves no room for, and settings that contradict one
    another.

    A constraint needs a canvas that is free to draw what it demands, and a log-probability in a
    masked model a step that decided the token, which tokens that the request brings have not.
    """
    if problem := spec.rule.contradiction(spec.all_settings(arguments.settings)):
        # Its settings contradict one another, or the server's for those that are left out.
        names, reason = problem
        name = next(name for name in names if name in arguments.settings)
        yield PREFIX + name, f"does not go with the rest: {reason}.", None
    reports = params.logprobs is not None or params.logprob_token_ids
    is_predicted = bool(arguments.prediction or arguments.predicts_prompt)
    brings = {
        "diffusion_seed_canvas": arguments.seed_canvas is not None,
        "prediction": is_predicted,
    }
    for field, is_set in brings.items():
        if reports and is_set and spec.marks_undecided:
            reason = (
                f"(top_logprobs, logprob_token_ids) cannot be combined with {field} in this "
                "model, where no step decides the tokens that a request brings; leave one of them out."
            )
            yield "logprobs", reason, params.logprobs
    own_start: dict[str, Any] = {
        "suffix": arguments.suffix,
        "diffusion_seed_canvas": arguments.seed_canvas,
        "diffusion_read_only": arguments.read_only,
    }
    if is_predicted:
        yield from _beside("prediction, from which the canvases start", own_start)
    constraints = {
        "structured_outputs": params.structured_outputs is not None,
        "bad_words": bool(params.bad_words),
        "thinking_token_budget": params.thinking_token_budget is not None,
    }
    for field, is_set in constraints.items():
        if is_set and (arguments.read_only or arguments.allowed_ids is not None):
            other = "diffusion_read_only" if arguments.read_only else "diffusion_constrained"
            yield other, f"cannot be combined with {field}; leave one of them out.", None
    first_canvas = {
        "diffusion_seed_canvas": arguments.seed_canvas,
        "diffusion_read_only": arguments.read_only,
        "diffusion_constrained": arguments.allowed_ids,
        "diffusion_canvas_length": arguments.canvas_length,
        **constraints,
    }
    if arguments.suffix:
        yield from _beside("suffix, before which the answer has a fixed length", first_canvas)
    allowed, brought = params.allowed_token_ids, arguments.seed_canvas or ()
    for position in arguments.pinned if allowed is not None else ():
        if brought[position] not in allowed:
            reason = (
                f"holds token {brought[position]} at position {position}, which allowed_token_ids "
                "does not list; add it there, or leave the position out."
            )
            yield "diffusion_pinned", reason, None
    width = arguments.canvas_length or spec.length
    if arguments.read_only and params.min_tokens > (most := min(params.max_tokens or width, width)):
        reason = (
            f"must be at most {most}, the tokens that diffusion_read_only reads; got "
            f"{params.min_tokens}. Lower it, or leave it out."
        )
        yield "min_tokens", reason, params.min_tokens


def _beside(other: str, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Find which fields are set, all of which another one excludes."""
    for field, value in fields.items():
        if value:
            yield field, f"cannot be combined with {other}; leave one of them out.", None


def _narrowed(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> RequestArguments:
    """Return the arguments with what vLLM's own parameters say of canvases, which are no wider than
    needed.

    ``max_tokens`` and ``ignore_eos`` of a read-only request are set in place.
    """
    if spec.rule.judges_filtered:
        top_k, top_p = noted_filters(params)
        arguments = msgspec.structs.replace(arguments, judging_top_k=top_k, judging_top_p=top_p)
    chosen = spec.of_request(arguments.settings)
    if chosen is not spec:
        # A draft of one token is none: its commit draws the next token.
        is_draft = spec.ways[spec.way(arguments.settings)] != AUTOREGRESSIVE
        arguments = msgspec.structs.replace(
            arguments,
            canvas_length=(arguments.canvas_length or chosen.length) if is_draft else 1,
            max_steps=chosen.max_denoising_steps,
        )
    width = arguments.canvas_length or spec.length
    if arguments.read_only:
        # One canvas is the whole output, and an end token drawn into it does not end it early.
        params.max_tokens = min(params.max_tokens or width, width)
        params.ignore_eos = True
    elif (
        params.max_tokens is not None
        and params.max_tokens < width
        and arguments.seed_canvas is None
        and not arguments.suffix
        # What a masked model writes at a position depends on the masks after it.
        and not spec.marks_undecided
    ):
        return msgspec.structs.replace(arguments, canvas_length=params.max_tokens)
    return arguments


def _suffix(params: Any, tokenizer: Any, model_config: Any) -> tuple[int, ...]:
    """Return the token ids of what follows a request's answer; none of most requests.

    A text that is longer than this model's longest suffix is cut before it is made tokens, so that
    an editor may send all that follows its cursor.
    """
    text = (params.extra_args or {}).get("diffusion_suffix") or ""
    if not isinstance(text, str):
        refuse("suffix", f"must be text; got {reprlib.repr(text)}.")
    most = model_config.diffusion.spec.length
    if tokenizer is not None:
        text = text[: most * tokenizer.max_chars_per_token]
    return _tokens("suffix", text, tokenizer, model_config, most)[:most]


def _prediction(params: Any, tokenizer: Any, model_config: Any) -> dict[str, Any]:
    """Return the arguments for a text that an answer is expected to resemble; none of most
    requests.

    Raises:
        VLLMValidationError: If it is neither a text nor ``"prompt"`` nor what OpenAI's
            ``prediction`` may be.
    """
    sent = (params.extra_args or {}).get(PREFIX + "prediction")
    if sent is None or sent == PROMPT:
        return {"predicts_prompt": sent == PROMPT}
    field = _field_of("prediction", sent)
    text = predicted_text(sent, field)
    tokens = _tokens(field, text, tokenizer, model_config, MOST_PREDICTED)
    _check_predicted(len(tokens), field)
    return {"prediction": tokens}


def _check_predicted(num_tokens: int, field: str = "prediction") -> None:
    if num_tokens > MOST_PREDICTED:
        refuse(
            field,
            f"has {num_tokens} tokens; each canvas searches them, and at most {MOST_PREDICTED} are taken. Send the part "
            "that the answer is likely to repeat.",
        )


def _tokens(
    field: str, text: str, tokenizer: Any, model_config: Any, most_tokens: int
) -> tuple[int, ...]:
    """Return the token ids of a text of a request other than its prompt."""
    if not text:
        return ()
    if tokenizer is None:
        refuse(field, "needs a tokenizer, which this server was started without; leave it out.")
    # Before it takes the tokenizer any time.
    if len(text) > (most := most_tokens * tokenizer.max_chars_per_token):
        refuse(field, f"has {len(text)} characters; this model takes at most {most}. Send less.")
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    _check_vocabulary(tokens, model_config.get_vocab_size(), field)
    return tokens


def _thought_end(
    arguments: RequestArguments, spec: CanvasSpec, tokenizer: Any
) -> tuple[int, ...] | None:
    """Return the tokens that end a thought, of a request that has them made likelier; ``None`` of
    any other.
    """
    if not spec.rule.ends_thoughts or not spec.all_settings(arguments.settings)[_BOOST]:
        return None
    return tuple(tokenizer.encode(THOUGHT_END, add_special_tokens=False)) if tokenizer else ()


def _boosted(params: Any, thought_end: tuple[int, ...] | None) -> Iterator[Problem]:
    """Find what changes the same logits as the boost of a thought's end, and an end that is too
    long.
    """
    if thought_end is None:
        return
    for field in ("logit_bias", "allowed_token_ids", "min_tokens"):
        if value := getattr(params, field):
            reason = f"cannot be combined with {PREFIX}{_BOOST}; leave one of them out."
            yield field, reason, value
    if not 0 < len(thought_end) <= MOST_THOUGHT_END:
        reason = f"needs a tokenizer in which {THOUGHT_END} is 1 to {MOST_THOUGHT_END} tokens; leave it out."
        yield PREFIX + _BOOST, reason, None


def _logprobs(params: Any, model_config: Any, num_slots: int) -> Iterator[Problem]:
    """Find more log-probabilities than the server has memory for until their tokens are emitted."""
    num_top = params.logprobs or 0
    if num_top < 0:
        num_top = model_config.get_vocab_size()
    width = model_config.diffusion.spec.length
    # Besides the likeliest tokens there is the position's own.
    most = MOST_LOGPROBS_BYTES // (_BYTES_A_LOGPROB * num_slots * width) - 1
    if num_top > most:
        reason = (
            f"(top_logprobs) may be at most {most} on this server, which keeps them for {num_slots} "
            f"canvases of {width} tokens in {MOST_LOGPROBS_BYTES // 2**20} MiB; got "
            f"{params.logprobs}. Lower it, or start the server with a lower --max-num-seqs."
        )
        yield "logprobs", reason, params.logprobs


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Refuse a token that a checkpoint's tokenizer has and its model has not: looking it up ends
    the engine.
    """
    if token_ids and (most := max(token_ids)) >= vocab_size:
        refuse(
            field,
            f"holds the token id {most}, which is out of this model's vocabulary of {vocab_size} tokens (a tokenizer "
            "may have more than its model); leave out that token or its text.",
        )


def _cut_suffix(params: Any, num_prompt: int, model_config: Any) -> None:
    """Cut a suffix at its far end to the tokens that are in sight while the answer is written;
    refuse an answer that leaves it none.
    """
    spec, arguments = model_config.diffusion.spec, arguments_of(params)
    if not arguments.suffix:
        return
    num_given = spec.num_given(num_prompt)
    most = min(spec.length, num_given + model_config.max_model_len - num_prompt)
    max_tokens = most if params.max_tokens is None else params.max_tokens
    check_room(num_given, max_tokens, most)
    suffix = arguments.suffix[: most - num_given - max_tokens]
    attach_arguments(params, msgspec.structs.replace(arguments, suffix=suffix))


def _check_blocks(params: Any, num_prompt: int, model_config: Any) -> None:
    """Refuse an answer of no whole blocks from a request that names their length, as LLaDA's loop
    does.

    An answer of all that the model has room for is vLLM's default: the request did not set that
    length.
    """
    spec, length = model_config.diffusion.spec, arguments_of(params).settings.get("block_length")
    most, max_tokens = model_config.max_model_len - num_prompt, params.max_tokens
    if length is None or max_tokens is None or max_tokens >= most:
        return
    if spec.layout.has_whole_blocks and max_tokens % int(length):
        refuse(
            "max_tokens",
            f"must be a multiple of diffusion_block_length, {length}; got {max_tokens}. Leave diffusion_block_length "
            "out for an answer that is cut.",
            max_tokens,
        )
