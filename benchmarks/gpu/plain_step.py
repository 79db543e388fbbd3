"""A sampler with its canvases as serving makes them, without an engine: random weights, the 26B shape."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from timing import device
from torch import Tensor

from vllm_diffusion.canvas.cuda_graphs import Capture, cuda_capture
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.canvas.step import CanvasStep
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.layouts import FreeCanvas
from vllm_diffusion.requests.arguments import RequestArguments
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.sampler import DiffusionSampler

DEVICE = device()
SETTINGS = {
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the server."""

    canvas: int = 256
    vocab: int = 262144
    hidden: int = 2816
    slots: int = 32
    dtype: torch.dtype = torch.bfloat16


TOY = Sizes(canvas=8, vocab=300, hidden=16, slots=4, dtype=torch.float32)


def own_stream() -> contextlib.AbstractContextManager[object]:
    """The stream that graphs are captured and replayed on: the same in every call."""
    return torch.cuda.stream(_stream()) if DEVICE.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def capture_of(device: torch.device) -> Capture:
    """How functions are captured: as graphs on a GPU, emulated on a CPU."""
    if device.type == "cuda":
        return cuda_capture()
    from tests.support.graphs import emulated_capture

    return emulated_capture


class Server:
    """What a worker holds besides the backbone.

    Attributes:
        sampler: The sampler.
        slots: Its canvases.
        soft_embeds: [slots, canvas, hidden], what the last step left for self-conditioning.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._generator = torch.Generator(DEVICE).manual_seed(0)
        weight = self.random(sizes.vocab, sizes.hidden) * 0.2
        spec = CanvasSpec(FreeCanvas(sizes.canvas), EntropyBound(), 48, SETTINGS)
        self.slots = CanvasSlots(sizes.slots, spec, sizes.vocab, DEVICE)
        self.soft_embeds = torch.zeros(
            sizes.slots, sizes.canvas, sizes.hidden, dtype=sizes.dtype, device=DEVICE
        )
        head = OutputHead(weight, weight, 0, 30.0, sizes.dtype, F.linear, 1, sizes.vocab)
        compiler = "inductor" if DEVICE.type == "cuda" else None
        self.pass_rows = PassRows(self.slots, sizes.slots * sizes.canvas, compiler)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=DEVICE)

        # What a captured step reads of vLLM's state.
        stock = SimpleNamespace(
            sampling_states=None,
            logprob_token_ids_state=None,
            penalties_state=SimpleNamespace(
                prompt_bin_mask=zeros(sizes.slots, -(-sizes.vocab // 32)),
                output_bin_counts=zeros(sizes.slots, sizes.vocab),
            ),
            req_states=SimpleNamespace(
                prompt_len=None, num_computed_tokens=SimpleNamespace(gpu=zeros(sizes.slots) + 7)
            ),
            logprobs_mode="raw_logprobs",
        )
        step = CanvasStep(self.slots, compile_backend=compiler)
        self.sampler = DiffusionSampler(stock, self.pass_rows, step, head, self._store, 20)
        self.pass_rows.of_slots.seed.copy_(torch.arange(sizes.slots) + 40)

    def _store(self, soft_embeds: Tensor, slot: Tensor, position: Tensor) -> None:
        self.soft_embeds[slot, position] = soft_embeds.to(self.soft_embeds.dtype)

    def random(self, *shape: int) -> Tensor:
        """Normally distributed, in the model's dtype."""
        return torch.randn(*shape, generator=self._generator, device=DEVICE).to(self.sizes.dtype)

    def begin(self, canvases: int) -> None:
        """Put new requests into all slots, the first of which denoise; every canvas is noise."""
        for slot in range(self.sizes.slots):
            self.slots.add_request(slot, NewRequest(RequestArguments(), prompt_len=7))
        self.slots.apply_staged_writes()
        noise = torch.Generator(DEVICE).manual_seed(1)
        self.slots.canvas.random_(0, self.sizes.vocab, generator=noise)
        self.soft_embeds.zero_()
        self.lay_out(canvases)

    def lay_out(self, canvases: int) -> None:
        """A pass in which so many slots denoise."""
        C = self.sizes.canvas
        starts = np.arange(canvases + 1) * C
        seven = np.full(canvases, 7)
        self.pass_rows.lay_out(
            SimpleNamespace(  # type: ignore[arg-type]
                num_reqs=canvases,
                idx_mapping_np=np.arange(canvases),
                cu_num_logits_np=starts,
                query_start_loc_np=starts,
                num_scheduled_tokens=np.full(canvases, C),
                num_computed_prefill_tokens_np=seven,
                prefill_len_np=seven,
                is_prefilling_np=np.zeros(canvases, dtype=bool),
            )
        )

    def inputs(self, canvases: int) -> tuple[Tensor, ...]:
        """Of ``sampler.graphs.plain_step``, for the pass that :meth:`begin` laid out: random hidden rows."""
        return (self.random(canvases * self.sizes.canvas, self.sizes.hidden),)

    def state(self) -> dict[str, Tensor]:
        """Everything that a step may write, copied."""
        slots = vars(self.slots)
        found = {name: value for name, value in slots.items() if isinstance(value, Tensor)}
        found |= self.slots.rule_memory | {"soft embeddings": self.soft_embeds}
        return {name: value.clone() for name, value in found.items()}

    def capture(self, canvases: int) -> None:
        """As serving does, for 1 to so many canvases; on the current stream."""
        hidden = torch.zeros(
            canvases * self.sizes.canvas, self.sizes.hidden, dtype=self.sizes.dtype, device=DEVICE
        )
        self.sampler.capture(capture_of(DEVICE), range(canvases, 0, -1), hidden)
