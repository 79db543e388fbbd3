"""A request's own arguments: one struct, made of what a client sent where the request is checked.

The struct takes the place of what the client wrote in all code that follows: it travels to the
engine's process and the workers in ``SamplingParams.extra_args``. After that check this package
reads no argument by its name. vLLM's schedulers do: they read ``diffusion_canvas_length``,
``diffusion_read_only`` and ``diffusion_max_steps``. Also here: what several parts ask of vLLM's own
parameters.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import REQUESTED_STEPS, RULE, Choice, Setting
from vllm_diffusion.requests.refusals import refuse

PREFIX = "diffusion_"
# Setting that makes the end of a thought likelier.
BOOST = PREFIX + "end_think_logit_boost"
# Token ids of the longest end of a thought.
MOST_THOUGHT_END = 16
# Tokens of the longest text that an answer is expected to resemble, which each canvas searches.
MOST_PREDICTED = 8192
# Key of ``extra_args`` that holds the struct. What a client sends under it is dropped.
_PARSED = "vllm_diffusion"
# Argument that asks for what each step of each canvas began from, and attribute of an output.
TRACE = PREFIX + "trace"
# Message about frames that were requested elsewhere, after the field's name.
WHERE_FRAMES_ARE = (
    "is sent while an answer is written: set stream to true on /v1/chat/completions or "
    "/v1/completions, the only ones that send frames; in Python use vllm_diffusion.live.watch."
)
# Answers of one call that are shown: its prompts times n.
MOST_WATCHED_ANSWERS = 16
FRAME_FIELDS = ("token_ids", "tokens", "kept", "entropy")
_NAMES: tuple[str, ...] = (
    *("diffusion_max_steps", "diffusion_canvas_length", "diffusion_seed_canvas"),
    *("diffusion_pinned", "diffusion_suffix", "diffusion_prediction", "diffusion_read_only"),
    *("diffusion_constrained", "diffusion_frames", "diffusion_frame_fields"),
    *("diffusion_step_map", "diffusion_trace"),
)

# Names of arguments in publishers' loops, to ours. Ignored, they would give another answer than the
# loop.
_PUBLISHED_NAMES = {
    "steps": "diffusion_max_steps",
    "num_diffusion_steps": "diffusion_max_steps",
    "denoising_steps": "diffusion_max_steps",
    "gen_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "block_length": "diffusion_block_length",
    "remasking": "diffusion_strategy",
    "remasking_strategy": "diffusion_strategy",
    "threshold": "diffusion_reveal_threshold",
    "confidence_threshold": "diffusion_reveal_threshold",
    "alg": "diffusion_algorithm",
    "alg_temp": "diffusion_alg_temp",
    "eps": "diffusion_eps",
    "logits_eos_inf": "diffusion_logits_eos_inf",
    "confidence_eos_eot_inf": "diffusion_confidence_eos_eot_inf",
}
_CACHE = (
    "is not served: an approximate cache changes tokens, and answers here are the exact loop's; leave it "
    "out."
)
_LIKELIHOOD = (
    "is not served: a likelihood that is estimated by drawing masks takes many passes for a number; score by "
    "logprobs of a generated answer, or leave it out."
)
# Publishers' arguments that are not served, with the reason and the remedy.
_NOT_SERVED = {
    "cfg_scale": "is not served: guidance runs the model twice a step, on the prompt and without it; leave "
    "it out.",
    "eb_gamma": "is not served: leave it out, and lower diffusion_max_steps for more tokens a pass.",
    "add_eos_at_end": "is not served: leave it out, and set max_tokens to about the answer's length.",
    **dict.fromkeys(("use_cache", "dual_cache", "use_block_cache"), _CACHE),
    **dict.fromkeys(("mc_num", "mc_iterations"), _LIKELIHOOD),
}
# All of them.
PUBLISHED_NAMES = frozenset({*_PUBLISHED_NAMES, *_NOT_SERVED})


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reports of a request's canvases besides their tokens.

    Attributes:
        frame_interval: Steps between two frames of a canvas, 1 to 2**31 - 1; ``None`` for no
            frames.
        frame_fields: Fields of a frame besides its text, out of ``FRAME_FIELDS``.
        step_map: True to report the step that decided each token.
        trace: True to report the canvas that each step began from, with the answer.
    """

    frame_interval: int | None = None
    frame_fields: tuple[str, ...] = ()
    step_map: bool = False
    trace: bool = False

    def __bool__(self) -> bool:
        return self.frame_interval is not None or self.step_map or self.trace


class RequestArguments(msgspec.Struct, frozen=True, omit_defaults=True):
    """Arguments of a request about its canvases.

    Attributes:
        max_steps: Step cap of its canvases, from 1 to the server's; ``None`` for the server's.
        canvas_length: Width of its canvases, from 1 token to the server's; ``None`` for the
            server's.
        seed_canvas: Token ids that the first canvas starts from, one per position; ``None`` for
            random ones.
        pinned: Positions of the first canvas, from 0, that keep their ``seed_canvas`` token in
            every step and in the answer.
        suffix: Token ids of what follows the answer in each step, which is exactly as many tokens
            as ``max_tokens``.
        num_closing: Tokens at its end that the model puts after every answer.
        prediction: Token ids of a text that the answer is expected to resemble; none for no such
            text.
        predicts_prompt: True if that text is the prompt.
        read_only: True to emit one canvas on the step that converges, and end; it is never encoded.
        allowed_ids: Only token ids that may be read; ``None`` for all.
        shown: Reports of its canvases besides their tokens.
        way: Place of its way among the server's.
        settings: Settings of the decoding rule that it sets, by name, within the bounds of the
            rule.
        thought_end: Token ids that end a thought, where their logits are boosted; none elsewhere.
        judging_top_k: ``top_k`` of a request at temperature 0, by which a rule judges its tokens; 0
            for none.
        judging_top_p: ``top_p``, likewise; 1 for none.
        body: Number of the body that it came in, with others perhaps; 0 for none.
    """

    max_steps: int | None = None
    canvas_length: int | None = None
    seed_canvas: tuple[int, ...] | None = None
    pinned: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    num_closing: int = 0
    prediction: tuple[int, ...] = ()
    predicts_prompt: bool = False
    read_only: bool = False
    allowed_ids: tuple[int, ...] | None = None
    shown: Shown = Shown()
    way: int = 0
    settings: Mapping[str, int | float | str] = msgspec.field(default_factory=dict)
    thought_end: tuple[int, ...] = ()
    judging_top_k: int = 0
    judging_top_p: float = 1.0
    body: int = 0

    def step_cap(self, spec: CanvasSpec) -> int:
        """Return the most steps that one of its canvases takes without a constraint."""
        return self.max_steps or spec.ways[self.way].max_denoising_steps

    def predicted(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """Return the text that the answer is expected to resemble; ``None`` if there is none."""
        return (prompt if self.predicts_prompt else self.prediction) or None


_NONE = RequestArguments()


def attach_arguments(sampling_params: Any, arguments: RequestArguments) -> None:
    """Put a request's arguments into its ``SamplingParams``, for :func:`arguments_of`.

    vLLM's schedulers read the width of a canvas by its name, so it is put there too.
    """
    extra_args = {k: v for k, v in (sampling_params.extra_args or {}).items() if k != _PARSED}
    if arguments != _NONE:
        extra_args[_PARSED] = arguments
    if arguments.canvas_length is not None:
        extra_args["diffusion_canvas_length"] = arguments.canvas_length
    sampling_params.extra_args = extra_args or None


def arguments_of(sampling_params: Any) -> RequestArguments:
    """Return the arguments of a request that was checked, in any process.

    A message between processes makes a mapping of the struct. It is made a struct again in place,
    so that each process does this once.

    Args:
        sampling_params: ``SamplingParams`` of the request; ``None`` for a request of vLLM's own,
            such as those that warm a worker up.
    """
    extra_args = (sampling_params.extra_args if sampling_params is not None else None) or {}
    sent = extra_args.get(_PARSED, _NONE)
    if isinstance(sent, RequestArguments):
        return sent
    arguments = msgspec.convert(sent, RequestArguments)
    extra_args[_PARSED] = arguments
    return arguments


def argument_names(spec: CanvasSpec) -> tuple[str, ...]:
    """Return the names of the arguments that a request may have."""
    presets = ("diffusion_preset",) if spec.presets else ()
    rule = (PREFIX + RULE,) if spec.way_names else ()
    return _NAMES + presets + rule + tuple(PREFIX + name for name in spec.rule_settings)


def offered_settings(spec: CanvasSpec) -> list[dict[str, Any]]:
    """Describe as JSON what a request may set about denoising.

    Returns:
        For each argument its ``name``, ``meaning``, ``default`` and either the ``words`` to choose
        from or ``is_integer``, ``low`` and ``high``.
    """
    offered: dict[str, tuple[Setting | Choice, float | str | None]] = {}
    if spec.presets:
        preset_names = tuple(spec.presets)
        offered["preset"] = Choice(preset_names, "settings of the rule that go together"), None
    most = spec.ways[0].max_denoising_steps
    offered["max_steps"] = Setting(int, 1, most, "the step cap of a canvas"), most
    if spec.layout.narrows:
        width = Setting(int, 1, spec.length, "positions of a canvas")
        offered["canvas_length"] = width, spec.length
    offered |= {
        name: (setting, spec.settings[name]) for name, setting in spec.rule_settings.items()
    }
    if spec.way_names:
        offered[RULE] = spec.way_names, spec.ways[spec.default_way].name
    return [
        {"name": PREFIX + name, "meaning": setting.meaning, "default": default, **setting.bounds}
        for name, (setting, default) in offered.items()
    ]


def parse_arguments(
    extra_args: Mapping[str, Any] | None,
    *,
    spec: CanvasSpec,
    vocab_size: int,
    logprob_token_ids: Sequence[int] | None = None,
) -> RequestArguments:
    """Check a request's ``diffusion_*`` arguments, and make the struct of them.

    Args:
        extra_args: ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
        spec: Description of the server's canvases.
        vocab_size: Number of token ids.
        logprob_token_ids: ``SamplingParams.logprob_token_ids``, the allowed set of
            ``diffusion_constrained``.

    Raises:
        VLLMValidationError: Naming the field, what it got and what is allowed.
    """
    args = extra_args or {}
    names = argument_names(spec)
    for name, value in args.items():
        published = name.removeprefix(PREFIX)
        if published in _NOT_SERVED and value:
            refuse(name, _NOT_SERVED[published])
        own = _PUBLISHED_NAMES.get(published)
        if name not in names and own in (*names, "max_tokens"):
            refuse(name, f"is called {own} here; send it by that name.")
        if name == PREFIX + RULE and name not in names:
            refuse(
                name,
                "cannot be chosen on this server, which decodes every request by one rule; leave it out, or list "
                'several in the server\'s setting "rules".',
            )
        if name.startswith(PREFIX) and name not in names and published not in _NOT_SERVED:
            refuse(name, f"is unknown; this server knows {', '.join(names)}.")

    chosen = _value(args, PREFIX + RULE, spec.way_names) if spec.way_names else None
    way = next((each for each in spec.ways if each.name == chosen), spec.ways[spec.default_way])
    width = _value(args, "diffusion_canvas_length", Setting(int, 1, spec.length))
    if width is not None and width != spec.length and not spec.layout.narrows:
        refuse(
            "diffusion_canvas_length",
            f"must be {spec.length}, the length of this model's blocks; leave it out.",
        )
    expected = width or spec.length
    sent = args.get("diffusion_seed_canvas")
    if isinstance(sent, (list, tuple)) and len(sent) != expected:
        refuse(
            "diffusion_seed_canvas",
            f"must hold exactly {expected} token ids, one per canvas position; got {len(sent)}.",
        )
    seed_canvas = _id_list(args, "diffusion_seed_canvas", vocab_size)
    sent = args.get("diffusion_pinned")
    if isinstance(sent, (list, tuple)) and len(sent) > expected:
        refuse(
            "diffusion_pinned",
            f"may hold at most {expected} positions of the canvas; got {len(sent)}.",
        )
    pinned = _id_list(args, "diffusion_pinned", expected)
    if pinned and seed_canvas is None:
        refuse("diffusion_pinned", "needs diffusion_seed_canvas, whose tokens it holds in place.")
    constrained = _flag(args, "diffusion_constrained")
    if constrained and not logprob_token_ids:
        refuse("diffusion_constrained", "needs logprob_token_ids, which are the allowed ids.")
    shown, read_only = parse_shown(args), _flag(args, "diffusion_read_only")
    preset = _value(args, "diffusion_preset", Choice(tuple(spec.presets)))
    settings = {} if preset is None else dict(spec.presets[preset])
    for name, setting in spec.rule_settings.items():
        if (value := _value(args, PREFIX + name, setting)) is not None:
            settings[name] = value
    max_steps = _value(args, "diffusion_max_steps", REQUESTED_STEPS)
    return RequestArguments(
        # Stock lowers a cap above the server's to the server's; so do we.
        max_steps=None if max_steps is None else min(max_steps, way.max_denoising_steps),
        canvas_length=width,
        seed_canvas=seed_canvas,
        pinned=pinned or (),
        read_only=read_only,
        allowed_ids=tuple(logprob_token_ids) if constrained and logprob_token_ids else None,
        shown=shown,
        way=spec.ways.index(way),
        settings=settings,
    )


def check_watched(frame_interval: Any, num_answers: int) -> None:
    """Refuse frames of more answers than one request shows."""
    if frame_interval and num_answers > MOST_WATCHED_ANSWERS:
        refuse(
            "diffusion_frames",
            f"shows at most {MOST_WATCHED_ANSWERS} answers of one request; got {num_answers}. Lower n or the number of "
            "prompts.",
        )


def parse_shown(extra_args: Mapping[str, Any] | None) -> Shown:
    """Check a request's ``diffusion_*`` arguments about reports besides tokens.

    Args:
        extra_args: ``SamplingParams.extra_args``, as in :func:`parse_arguments`.

    Raises:
        VLLMValidationError: Naming the field, what it got and what is allowed.
    """
    args = extra_args or {}
    interval = _value(args, "diffusion_frames", REQUESTED_STEPS)
    fields = args.get("diffusion_frame_fields")
    if fields is not None and interval is None:
        refuse("diffusion_frame_fields", "needs diffusion_frames, the interval of frames in steps.")
    if fields is not None and not (
        isinstance(fields, (list, tuple)) and all(field in FRAME_FIELDS for field in fields)
    ):
        refuse(
            "diffusion_frame_fields",
            f"must be a list of {', '.join(FRAME_FIELDS)}; got {reprlib.repr(fields)}.",
        )
    return Shown(
        interval,
        tuple(fields or ()),
        _flag(args, "diffusion_step_map"),
        _flag(args, "diffusion_trace"),
    )


def _value(args: Mapping[str, Any], name: str, setting: Setting | Choice) -> Any:
    """Return an argument as a number or word; ``None`` where it is left out."""
    value = args.get(name)
    if value is None:
        return None
    if not setting.allows(value):
        refuse(name, f"{setting.requirement}; got {reprlib.repr(value)}.")
    return value if isinstance(setting, Choice) else setting.kind(value)


def _id_list(args: Mapping[str, Any], name: str, bound: int) -> tuple[int, ...] | None:
    value = args.get(name)
    if value is None:
        return None
    # JSON's true and false are integers in Python.
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    ):
        refuse(name, f"must be a list of integers; got {reprlib.repr(value)}.")
    for item in value:
        if not 0 <= item < bound:
            refuse(name, f"must hold integers in [0, {bound}); got {item}.")
    return tuple(value)


def _flag(args: Mapping[str, Any], name: str) -> bool:
    value = args.get(name)
    if value is None:
        return False
    # The server's vllm_xargs narrows JSON booleans to 0 and 1.
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        refuse(name, f"must be true or false (or 1 or 0); got {reprlib.repr(value)}.")
    return bool(value)


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


def with_end_texts(
    generation: Mapping[str, Any], spec: CanvasSpec | None, tokenizer: Any
) -> dict[str, Any]:
    """Return the fields of ``generation_config.json`` with the end tokens of a family added to its
    own.

    Args:
        generation: The checkpoint's fields.
        spec: Description of the model's canvases; ``None`` if it has none.
        tokenizer: The served model's, by which a text that is not one token ends nothing; ``None``
            where vLLM was started without one.
    """
    fields = dict(generation)
    if spec is None or tokenizer is None or not spec.end_texts:
        return fields
    own = fields.get("eos_token_id") or []
    ids = {own} if isinstance(own, int) else set(own)
    for text in spec.end_texts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids.update(found if len(found) == 1 else ())
    return fields | {"eos_token_id": sorted(ids)}


def end_token_ids(sampling_params: Any) -> list[int]:
    """Return the tokens that end a request: its own, and the model's unless it ignores them."""
    ends = list(sampling_params.stop_token_ids or ())
    if sampling_params.eos_token_id is not None:
        ends.append(sampling_params.eos_token_id)
    return ends
