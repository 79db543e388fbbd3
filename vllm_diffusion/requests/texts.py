"""Texts that a request brings besides its prompt, as tokens: what follows its answer, what the
answer is expected to resemble, and what ends a thought.
"""

import contextlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from vllm_diffusion.requests.arguments import BOOST, MOST_PREDICTED, MOST_THOUGHT_END, PREFIX
from vllm_diffusion.requests.checked_request import CheckedRequest
from vllm_diffusion.requests.refusals import refuse
from vllm_diffusion.startup.plan import spec_of

# Value of a prediction: the text is the prompt.
PROMPT = "prompt"
# What ends a thought.
THOUGHT_END = "</think>"
# Tokens of texts that were made off the event loop.
_made: ContextVar[Mapping[str, tuple[int, ...]]] = ContextVar("made_tokens")


@contextlib.contextmanager
def made_tokens(made: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Within the block :func:`brought_tokens` takes the tokens of these texts as they are."""
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)


def brought_texts(params: Any, processor: Any) -> list[str]:
    """Return the texts of a request whose tokens may be made before it is admitted.

    Args:
        params: Its ``SamplingParams``, or another kind of parameters that brings none.
        processor: vLLM's ``InputProcessor``.

    Raises:
        VLLMValidationError: Naming a field that cannot be made tokens.
    """
    extra_args = getattr(params, "extra_args", None) or {}
    if spec_of(processor.model_config) is None:
        return []
    both = _suffix_text(extra_args, processor), _prediction_text(extra_args, processor)
    return [text for text in both if text]


def brought_tokens(request: CheckedRequest) -> dict[str, Any]:
    """Return the arguments of a request that are tokens of its texts.

    Raises:
        VLLMValidationError: Naming the text's field.
    """
    extra_args, processor = request.params.extra_args or {}, request.processor
    sent = extra_args.get(PREFIX + "prediction")
    predicts_prompt = sent == PROMPT
    field = field_of("prediction", sent)
    predicted = _tokens(field, _prediction_text(extra_args, processor), processor)
    if (length := request.num_prompt if predicts_prompt else len(predicted)) > MOST_PREDICTED:
        refuse(
            field,
            f"has {length} tokens; at most {MOST_PREDICTED} are searched. Send the part that "
            "the answer is likely to repeat.",
        )
    return {
        "suffix": _suffix(request, _suffix_text(extra_args, processor)),
        "prediction": predicted,
        "predicts_prompt": predicts_prompt,
        "thought_end": _thought_end(request),
    }


def field_of(name: str, value: Any) -> str:
    """Return the field in which a client has sent an argument, given without its prefix."""
    # OpenAI's prediction is an object.
    is_openai = name == "suffix" or (name == "prediction" and isinstance(value, Mapping))
    return name if is_openai else PREFIX + name


def predicted_text(sent: Any, field: str) -> str:
    """Return the text that an answer is expected to resemble.

    Args:
        sent: A text or what OpenAI's ``prediction`` may be, a mapping.
        field: Name of the client's field: in ``prediction`` there is no bare text.

    Raises:
        VLLMValidationError: Naming the field, if it is neither.
    """
    text = sent if field == PREFIX + "prediction" else None
    if isinstance(sent, Mapping):
        text = sent.get("content") if sent.get("type") == "content" else None
    if isinstance(text, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in text
    ):
        parts = [part.get("text") for part in text]
        text = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(text, str):
        refuse(
            field,
            'must be {"type": "content", "content": ...} with a text or a list of {"type": "text", "text": ...}; as '
            f'diffusion_prediction also a text, or "{PROMPT}"; got {reprlib.repr(sent)}.',
        )
    return text


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Refuse a token that a checkpoint's tokenizer has and its model has not: looking it up ends
    the engine.
    """
    if token_ids and (most := max(token_ids)) >= vocab_size:
        refuse(
            field,
            f"holds the token id {most}, which is out of this model's vocabulary of {vocab_size} tokens (a tokenizer "
            "may have more than its model); leave out that token or its text.",
        )


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


def _prediction_text(extra_args: Mapping[str, Any], processor: Any) -> str:
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


def _suffix(request: CheckedRequest, text: str) -> tuple[int, ...]:
    """Return the token ids of what follows a request's answer, as many as are in sight while the
    answer is written.
    """
    if not text:
        return ()
    spec, num_prompt = request.spec, request.num_prompt
    tokens = _tokens("suffix", text, request.processor)
    num_given = spec.num_given(num_prompt)
    room = request.processor.model_config.max_model_len - num_prompt
    most = min(spec.length, num_given + room) - len(spec.closing)
    max_tokens = most if request.params.max_tokens is None else request.params.max_tokens
    if num_given + max_tokens >= most:
        refuse(
            "suffix",
            f"has no room: max_tokens={max_tokens}, {num_given} tokens of the prompt and at least one of the suffix must "
            f"fit into {most} tokens, which this model writes at once. Lower max_tokens to about the length of the gap.",
        )
    return tokens[: most - num_given - max_tokens]


def _thought_end(request: CheckedRequest) -> tuple[int, ...]:
    """Return the token ids that end a thought, if the request makes them likelier."""
    if not request.settings.get(BOOST.removeprefix(PREFIX)):
        return ()
    tokenizer = request.processor.tokenizer
    tokens = tokenizer.encode(THOUGHT_END, add_special_tokens=False) if tokenizer else ()
    if not 0 < len(tokens) <= MOST_THOUGHT_END:
        refuse(
            BOOST,
            f"needs a tokenizer in which {THOUGHT_END} is 1 to {MOST_THOUGHT_END} tokens; leave it out.",
        )
    return tuple(tokens)


def _tokens(field: str, text: str, processor: Any) -> tuple[int, ...]:
    """Return the token ids of a text of a request other than its prompt."""
    if not text:
        return ()
    tokens = _made.get({}).get(text)
    if tokens is None:
        tokens = tuple(processor.tokenizer.encode(text, add_special_tokens=False))
    check_vocabulary(tokens, processor.model_config.get_vocab_size(), field)
    return tokens
