"""The ``diffusion_*`` arguments of one request: parsed, checked, and nothing else.

Used at the door (in the API process, where a mistake becomes a 400 that names the field) and in
the worker (where the same values come in already checked).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.settings import REQUESTED_STEPS, Choice, Setting

PREFIX = "diffusion_"


class RequestParamError(ValueError):
    """A request's argument is of the wrong type, out of range, or contradicts another.

    Attributes:
        field: Name of the argument.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclass(frozen=True)
class Shown:
    """Reports of a request's canvases besides their tokens.

    Attributes:
        frame_interval: Steps between two frames of a canvas; ``None`` for no frames.
        frame_fields: Fields of a frame besides its text.
        step_map: True to report the step that decided each token.
        trace: True to report the canvas that each step began from, with the answer.
    """

    frame_interval: int | None = None
    frame_fields: tuple[str, ...] = ()
    step_map: bool = False
    trace: bool = False

    def __bool__(self) -> bool:
        return self.frame_interval is not None or self.step_map or self.trace


@dataclass(frozen=True)
class CanvasParams:
    """Arguments of a request about its canvases.

    Attributes:
        max_steps: Step cap N of this request; ``None`` for the server's.
        canvas_length: Width of its canvases in tokens; ``None`` for the server's.
        seed_canvas: The first canvas's starting tokens; ``None`` for random ones.
        pinned: Positions that keep their ``seed_canvas`` token as input in every step.
        read_only: True to emit one canvas on the step that converges, and end; it is never encoded.
        allowed_ids: Only token ids that may be read; ``None`` for all.
        shown: Reports of its canvases besides their tokens.
        settings: Settings of the decoding rule that it sets, by name.
    """

    max_steps: int | None = None
    canvas_length: int | None = None
    seed_canvas: tuple[int, ...] | None = None
    pinned: tuple[int, ...] = ()
    read_only: bool = False
    allowed_ids: tuple[int, ...] | None = None
    shown: Shown = Shown()
    settings: Mapping[str, float | str] = field(default_factory=dict)


FRAME_FIELDS = ("token_ids", "tokens", "kept", "entropy")

_NAMES: tuple[str, ...] = (
    "diffusion_max_steps",
    "diffusion_canvas_length",
    "diffusion_seed_canvas",
    "diffusion_pinned",
    "diffusion_read_only",
    "diffusion_constrained",
    "diffusion_frames",
    "diffusion_frame_fields",
    "diffusion_step_map",
    "diffusion_trace",
)


def argument_names(spec: CanvasSpec) -> tuple[str, ...]:
    """Return the names of the arguments that a request may have."""
    presets = ("diffusion_preset",) if spec.rule.presets else ()
    return _NAMES + presets + tuple(PREFIX + name for name in spec.rule.settings)


def parse_canvas_params(
    extra_args: Mapping[str, Any] | None,
    *,
    spec: CanvasSpec,
    vocab_size: int,
    logprob_token_ids: Sequence[int] | None = None,
) -> CanvasParams:
    """Check a request's ``diffusion_*`` arguments.

    Args:
        extra_args: ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).
        spec: Description of the server's canvases.
        vocab_size: Number of token ids.
        logprob_token_ids: ``SamplingParams.logprob_token_ids``, the allowed set of
            ``diffusion_constrained``.

    Raises:
        RequestParamError: Naming the field, what it got and what is allowed.
    """
    args = {k: v for k, v in (extra_args or {}).items() if k.startswith(PREFIX)}
    if not args:
        return CanvasParams()
    names = argument_names(spec)
    for name in args:
        if name not in names:
            raise RequestParamError(name, f"is not known; known are {', '.join(names)}.")

    canvas_length = spec.length
    width = _value(args, "diffusion_canvas_length", Setting(int, 1, canvas_length))
    if width is not None and not spec.layout.allows_width(width):
        raise RequestParamError(
            "diffusion_canvas_length",
            f"must be {canvas_length}, the length of this model's blocks; leave it out.",
        )
    seed_canvas = _id_list(args, "diffusion_seed_canvas", vocab_size)
    expected = width or canvas_length
    if seed_canvas is not None and len(seed_canvas) != expected:
        raise RequestParamError(
            "diffusion_seed_canvas",
            f"must hold exactly {expected} token ids, one per canvas position; got "
            f"{len(seed_canvas)}.",
        )
    pinned = _id_list(args, "diffusion_pinned", expected)
    if pinned and seed_canvas is None:
        raise RequestParamError(
            "diffusion_pinned", "needs diffusion_seed_canvas, whose tokens it holds in place."
        )
    constrained = _flag(args, "diffusion_constrained")
    if constrained and not logprob_token_ids:
        raise RequestParamError(
            "diffusion_constrained", "needs logprob_token_ids, which are the allowed ids."
        )
    shown, read_only = parse_shown(args), _flag(args, "diffusion_read_only")
    for name, is_asked in (
        ("diffusion_step_map", shown.step_map),
        ("diffusion_trace", shown.trace),
    ):
        if is_asked and read_only:
            raise RequestParamError(
                name,
                "cannot be combined with diffusion_read_only, which reads a canvas and keeps nothing "
                "of it; leave one of them out.",
            )
    settings = _preset(args, spec)
    for name, setting in spec.rule.settings.items():
        if (value := _value(args, PREFIX + name, setting)) is not None:
            settings[name] = value
    return CanvasParams(
        settings=settings,
        # Stock lowers a cap above the server's to the server's; so do we.
        max_steps=_capped(
            _value(args, "diffusion_max_steps", REQUESTED_STEPS), spec.max_denoising_steps
        ),
        canvas_length=width,
        seed_canvas=seed_canvas,
        pinned=pinned or (),
        read_only=read_only,
        shown=shown,
        allowed_ids=tuple(logprob_token_ids) if constrained and logprob_token_ids else None,
    )


def parse_shown(extra_args: Mapping[str, Any] | None) -> Shown:
    """Check a request's ``diffusion_*`` arguments about reports besides tokens.

    Args:
        extra_args: ``SamplingParams.extra_args``, as in :func:`parse_canvas_params`.

    Raises:
        RequestParamError: Naming the field, what it got and what is allowed.
    """
    args = extra_args or {}
    interval = _value(args, "diffusion_frames", REQUESTED_STEPS)
    fields = args.get("diffusion_frame_fields")
    if fields is not None and interval is None:
        raise RequestParamError(
            "diffusion_frame_fields", "needs diffusion_frames, the interval of frames in steps."
        )
    if fields is not None and not (
        isinstance(fields, (list, tuple)) and all(field in FRAME_FIELDS for field in fields)
    ):
        raise RequestParamError(
            "diffusion_frame_fields",
            f"must be a list of {', '.join(FRAME_FIELDS)}; got {_shown(fields)}.",
        )
    return Shown(
        interval,
        tuple(fields or ()),
        _flag(args, "diffusion_step_map"),
        _flag(args, "diffusion_trace"),
    )


def constraining_fields(params: Any) -> list[str]:
    """Fields of a request's ``SamplingParams`` that its canvases are held to, by name."""
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
    """Tokens that end a request: its own, and the model's unless it ignores them."""
    ends = list(sampling_params.stop_token_ids or ())
    if sampling_params.eos_token_id is not None:
        ends.append(sampling_params.eos_token_id)
    return ends


def is_read_only(sampling_params: Any) -> bool:
    """Return true if the request reads one canvas and ends; the API process checks the argument."""
    return bool((sampling_params.extra_args or {}).get("diffusion_read_only"))


def _capped(value: Any, cap: int) -> int | None:
    return None if value is None else min(value, cap)


def _shown(value: object) -> str:
    """``value`` as text that fits a message, however long it is."""
    return reprlib.repr(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(args: Mapping[str, Any], name: str, setting: Setting | Choice) -> Any:
    """The argument as what it is set to be; ``None`` where it is left out."""
    value = args.get(name)
    if value is None:
        return None
    if not setting.allows(value):
        raise RequestParamError(name, f"{setting.rule}; got {_shown(value)}.")
    return value if isinstance(setting, Choice) else setting.kind(value)


def _preset(args: Mapping[str, Any], spec: CanvasSpec) -> dict[str, float | str]:
    value = args.get("diffusion_preset")
    if value is None:
        return {}
    presets = spec.rule.presets
    if not presets:
        raise RequestParamError("diffusion_preset", "is not known: this model has no presets.")
    if not isinstance(value, str) or value not in presets:
        raise RequestParamError(
            "diffusion_preset", f"must be one of {', '.join(presets)}; got {_shown(value)}."
        )
    return dict(presets[value])


def _id_list(args: Mapping[str, Any], name: str, bound: int) -> tuple[int, ...] | None:
    value = args.get(name)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(_is_int(item) for item in value):
        raise RequestParamError(name, f"must be a list of integers; got {_shown(value)}.")
    for item in value:
        if not 0 <= item < bound:
            raise RequestParamError(name, f"must hold integers in [0, {bound}); got {item}.")
    return tuple(int(item) for item in value)


def _flag(args: Mapping[str, Any], name: str) -> bool:
    value = args.get(name)
    if value is None:
        return False
    # The server's vllm_xargs narrows JSON booleans to 0 and 1.
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise RequestParamError(name, f"must be true or false (or 1 or 0); got {_shown(value)}.")
    return bool(value)
