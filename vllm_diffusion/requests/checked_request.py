"""A request while it is checked: what a client sent, and what has been made of it."""

from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.ways import Way
from vllm_diffusion.requests.arguments import RequestArguments, attach_arguments
from vllm_diffusion.requests.refusals import refuse

_NO_ROOM = (
    "has {} tokens; an answer of at least one token and {} after it must fit into the model's {} too. "
    "Shorten it, or raise --max-model-len."
)


@dataclass(frozen=True)
class CheckedRequest:
    """A request of a server with canvases, on its way to the engine.

    Attributes:
        params: Its ``SamplingParams``, which vLLM has checked.
        arguments: What it asks for about its canvases.
        num_prompt: Tokens of its prompt.
        processor: vLLM's ``InputProcessor``, which knows the server.
    """

    params: Any
    arguments: RequestArguments
    num_prompt: int
    processor: Any

    @property
    def spec(self) -> CanvasSpec:
        """Description of the server's canvases."""
        spec: CanvasSpec = self.processor.model_config.diffusion.spec
        return spec

    @property
    def way(self) -> Way:
        """How its tokens are made."""
        return self.spec.ways[self.arguments.way]

    @property
    def settings(self) -> dict[str, float | str]:
        """The settings of its rule: its own, and the server's for those that it leaves out."""
        return self.spec.all_settings(self.arguments.settings)

    @property
    def width(self) -> int:
        """Positions of its widest canvas, as far as it names them."""
        return self.arguments.canvas_length or self.spec.length

    def freeze(self) -> None:
        """Give the parameters their arguments, for all code that follows, with the canvases of the
        way, which are no wider than needed.

        ``max_tokens`` and ``ignore_eos`` of a read-only request are set.
        """
        params, arguments, spec, way = self.params, self.arguments, self.spec, self.way
        narrowed: dict[str, Any] = {}
        width = self.width
        if spec.closing:
            if spec.room(self.num_prompt) < 1:
                refuse("prompt", _NO_ROOM.format(self.num_prompt, len(spec.closing), spec.length))
            narrowed["suffix"] = arguments.suffix + spec.closing
            narrowed["num_closing"] = len(spec.closing)
        if way is not spec.ways[0]:
            # A draft may be narrower than the server's canvases, and one token is one position.
            width = (arguments.canvas_length or way.length) if way.denoises else way.length
            narrowed = {"canvas_length": width, "max_steps": way.max_denoising_steps}
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
