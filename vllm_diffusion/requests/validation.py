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
from contextvars import ContextVar
from itertools import chain
from typing import Any

import msgspec

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.arguments import (
    MOST_PREDICTED,
    PREFIX,
    PROMPT,
    RequestArguments,
    attach_arguments,
    boosts_end,
    check_room,
    field_of,
    parse_arguments,
    predicted_text,
    too_long_to_predict,
    with_end_texts,
)
from vllm_diffusion.requests.bounds import Problem
from vllm_diffusion.requests.constraint import read_constraint
from vllm_diffusion.requests.exclusions import THOUGHT_END, excluded
from vllm_diffusion.requests.greedy_filters import noted_filters
from vllm_diffusion.requests.refusals import failing_aloud, refuse
from vllm_diffusion.startup.plan import spec_of
from vllm_diffusion.weights.adapters.early_checks import check_request


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
        # Both of vLLM's engines give it by name.
        admit(params, self, prompt, kwargs.get("lora_request"))
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


def admit(params: Any, processor: Any, prompt: Any, lora_request: Any = None) -> None:
    """Admit a request to the engine: read what it asks for, complete it, find what excludes what,
    and freeze it.

    Args:
        params: The request's ``SamplingParams``. They get the struct of arguments that all code
            after this reads, and their constraint is written as the engine follows it.
        processor: vLLM's ``InputProcessor`` of a diffusion model.
        prompt: The request's prompt, rendered.
        lora_request: Its adapter; ``None`` for none.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    model_config = processor.model_config
    spec: CanvasSpec | None = model_config.diffusion.spec
    token_ids = (prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None) or ()
    with failing_aloud():
        check_request(lora_request, model_config)
        _check_vocabulary(token_ids, model_config.get_vocab_size())
        if spec is None:
            _refuse_first(_without_effect(params))
        else:
            arguments = _completed(_read(params, processor), params, processor, token_ids)
            _refuse_first(excluded(params, arguments, processor, len(token_ids)))
            _freeze(params, arguments, spec)
        read_constraint(params.structured_outputs, processor.structured_outputs_config)


def _read(params: Any, processor: Any) -> RequestArguments:
    """Run vLLM's checks of what a request asks for, and read its arguments about canvases."""
    model_config = processor.model_config
    # First, so that ours read numbers and token ids of the vocabulary.
    params.verify(
        _NotDiffusion(model_config), processor.speculative_config, None, processor.tokenizer
    )
    _refuse_first(chain(_ignored(params), bounds.problems(params)))
    return parse_arguments(
        params.extra_args,
        spec=model_config.diffusion.spec,
        vocab_size=model_config.get_vocab_size(),
        logprob_token_ids=params.logprob_token_ids,
    )


def _completed(
    arguments: RequestArguments, params: Any, processor: Any, token_ids: Sequence[int]
) -> RequestArguments:
    """Return the arguments with what other fields and the prompt say of canvases."""
    model_config, tokenizer = processor.model_config, processor.tokenizer
    spec = model_config.diffusion.spec
    way = spec.ways[arguments.way]
    found = _prediction(params, processor)
    found["suffix"] = _suffix(params, len(token_ids), processor)
    if tokenizer is not None and boosts_end(arguments, spec):
        found["thought_end"] = tuple(tokenizer.encode(THOUGHT_END, add_special_tokens=False))
    if way.rule.judges_filtered:
        found["judging_top_k"], found["judging_top_p"] = noted_filters(params)
    return msgspec.structs.replace(arguments, **found)


def _without_effect(params: Any) -> Iterator[Problem]:
    """Find arguments about canvases where the server answers token after token."""
    for name in params.extra_args or {}:
        if name.startswith(PREFIX):
            reason = "has no effect here: the server answers token after token; leave it out."
            yield name, reason, None


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


def _freeze(params: Any, arguments: RequestArguments, spec: CanvasSpec) -> None:
    """Give a request's parameters its arguments, for all code that follows, with the canvases of
    its way, which are no wider than needed.

    ``max_tokens`` and ``ignore_eos`` of a read-only request are set.
    """
    way, narrowed = spec.ways[arguments.way], {}
    if way is not spec.ways[0]:
        # A draft may be narrower than the server's canvases, and one token is one position.
        width = (arguments.canvas_length or way.length) if way.denoises else way.length
        narrowed = {"canvas_length": width, "max_steps": way.max_denoising_steps}
    width = narrowed.get("canvas_length") or arguments.canvas_length or spec.length
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
        narrowed["canvas_length"] = params.max_tokens
    attach_arguments(params, msgspec.structs.replace(arguments, **narrowed))


# Tokens of texts that were made off the event loop.
_made: ContextVar[Mapping[str, tuple[int, ...]]] = ContextVar("made_tokens")


@contextlib.contextmanager
def made_tokens(made: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Within the block :func:`admit` takes the tokens of these texts as they are."""
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)


def brought_texts(params: Any, processor: Any) -> list[str]:
    """Return the texts that a request brings besides its prompt, and whose tokens it needs.

    Args:
        params: Its ``SamplingParams``, or another kind of parameters that brings none.
        processor: vLLM's ``InputProcessor``.

    Raises:
        VLLMValidationError: Naming a field that cannot be made tokens.
    """
    extra_args = getattr(params, "extra_args", None) or {}
    if spec_of(processor.model_config) is None:
        return []
    both = _suffix_text(extra_args, processor), _predicted_text(extra_args, processor)
    return [text for text in both if text]


def _suffix_text(extra_args: Mapping[str, Any], processor: Any) -> str:
    """Return what follows a request's answer, cut at its far end to as much as can be in sight, so
    that an editor may send all that follows its cursor; nothing for most requests.
    """
    text = extra_args.get(PREFIX + "suffix") or ""
    if not isinstance(text, str):
        refuse("suffix", f"must be text; got {reprlib.repr(text)}.")
    if not text:
        return ""
    _check_tokenizer("suffix", processor.tokenizer)
    return text[
        : processor.model_config.diffusion.spec.length * processor.tokenizer.max_chars_per_token
    ]


def _predicted_text(extra_args: Mapping[str, Any], processor: Any) -> str:
    """Return the text that an answer is expected to resemble; nothing for most requests, and where
    it is the prompt.
    """
    sent = extra_args.get(PREFIX + "prediction")
    if sent is None or sent == PROMPT:
        return ""
    field = field_of("prediction", sent)
    if not (text := predicted_text(sent, field)):
        return ""
    _check_tokenizer(field, processor.tokenizer)
    # Before it takes the tokenizer any time.
    if len(text) > (most := MOST_PREDICTED * processor.tokenizer.max_chars_per_token):
        refuse(field, f"has {len(text)} characters; this model takes at most {most}. Send less.")
    return text


def _check_tokenizer(field: str, tokenizer: Any) -> None:
    if tokenizer is None:
        refuse(field, "needs a tokenizer, which this server was started without; leave it out.")


def _suffix(params: Any, num_prompt: int, processor: Any) -> tuple[int, ...]:
    """Return the token ids of what follows a request's answer, as many as are in sight while the
    answer is written.
    """
    text = _suffix_text(params.extra_args or {}, processor)
    if not text:
        return ()
    model_config = processor.model_config
    spec, tokens = model_config.diffusion.spec, _tokens("suffix", text, processor)
    num_given = spec.num_given(num_prompt)
    most = min(spec.length, num_given + model_config.max_model_len - num_prompt)
    max_tokens = most if params.max_tokens is None else params.max_tokens
    check_room(num_given, max_tokens, most)
    return tokens[: most - num_given - max_tokens]


def _prediction(params: Any, processor: Any) -> dict[str, Any]:
    """Return the arguments for a text that an answer is expected to resemble; none of most
    requests.
    """
    sent = (params.extra_args or {}).get(PREFIX + "prediction")
    text = _predicted_text(params.extra_args or {}, processor)
    if not text:
        return {"predicts_prompt": sent == PROMPT}
    field = field_of("prediction", sent)
    tokens = _tokens(field, text, processor)
    if len(tokens) > MOST_PREDICTED:
        refuse(field, too_long_to_predict(len(tokens)))
    return {"prediction": tokens}


def _tokens(field: str, text: str, processor: Any) -> tuple[int, ...]:
    """Return the token ids of a text of a request other than its prompt."""
    tokens = _made.get({}).get(text)
    if tokens is None:
        tokens = tuple(processor.tokenizer.encode(text, add_special_tokens=False))
    _check_vocabulary(tokens, processor.model_config.get_vocab_size(), field)
    return tokens


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
