"""A sampler with its canvases as serving makes them, without an engine: random weights, the 26B shape."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from timing import device
from torch import Tensor

from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.requests.params import CanvasParams
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
        spec = CanvasSpec(sizes.canvas, EntropyBound(), 48, SETTINGS)
        self.slots = CanvasSlots(sizes.slots, spec, sizes.vocab, DEVICE)
        self.soft_embeds = torch.zeros(
            sizes.slots, sizes.canvas, sizes.hidden, dtype=sizes.dtype, device=DEVICE
        )
        head = OutputHead(weight, weight, 0, 30.0, sizes.dtype, F.linear, 1, sizes.vocab)
        stock = SimpleNamespace(
            sampling_states=None,
            logprob_token_ids_state=None,
            penalties_state=None,
            req_states=SimpleNamespace(prompt_len=None),
            logprobs_mode="raw_logprobs",
        )
        self.sampler = DiffusionSampler(
            stock,
            self.slots,
            head=head,
            store_soft_embeds=self._store,
            vocab_size=sizes.vocab,
            max_rows=sizes.slots * sizes.canvas,
            converge_at_end=False,
            emits_when_done=True,
            compile_backend="inductor" if DEVICE.type == "cuda" else None,
        )

    def _store(self, soft_embeds: Tensor, slot: Tensor, position: Tensor) -> None:
        self.soft_embeds[slot, position] = soft_embeds.to(self.soft_embeds.dtype)

    def random(self, *shape: int) -> Tensor:
        """Normally distributed, in the model's dtype."""
        return torch.randn(*shape, generator=self._generator, device=DEVICE).to(self.sizes.dtype)

    def begin(self) -> None:
        """Put new requests into all slots; every canvas is noise."""
        for slot in range(self.sizes.slots):
            self.slots.add_request(slot, NewRequest(CanvasParams(), prompt_len=7))
        self.slots.apply_staged_writes()
        noise = torch.Generator(DEVICE).manual_seed(1)
        self.slots.canvas.random_(0, self.sizes.vocab, generator=noise)
        self.soft_embeds.zero_()

    def inputs(self, canvases: int) -> tuple[Tensor, ...]:
        """Of ``sampler.plain_step``: a pass in which so many slots denoise, hidden rows random."""
        sizes, slots = self.sizes, self.sizes.slots
        n = canvases * sizes.canvas
        row = torch.arange(n, device=DEVICE)
        num_rows = torch.zeros(slots, dtype=torch.int32, device=DEVICE)
        num_rows[:canvases] = sizes.canvas
        idle = torch.zeros(slots, dtype=torch.bool, device=DEVICE)
        return (
            self.random(n, sizes.hidden),
            row // sizes.canvas,
            row % sizes.canvas,
            row % sizes.canvas + 7,
            num_rows,
            torch.arange(slots, dtype=torch.int64, device=DEVICE) + 40,
            idle,
            torch.ones(slots, device=DEVICE),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that a step may write, copied."""
        slots = vars(self.slots)
        found = {name: value for name, value in slots.items() if isinstance(value, Tensor)}
        found |= self.slots.rule_memory | {"soft embeddings": self.soft_embeds}
        return {name: value.clone() for name, value in found.items()}

    def capture(self, canvases: int) -> None:
        """As serving does, for 1 to so many canvases; on the current stream."""
        from vllm_diffusion.canvas.cuda_graphs import cuda_capture

        hidden = torch.zeros(
            canvases * self.sizes.canvas, self.sizes.hidden, dtype=self.sizes.dtype, device=DEVICE
        )
        capture = cuda_capture()
        if DEVICE.type == "cpu":
            from tests.support.graphs import emulated_capture

            capture = emulated_capture
        self.sampler.capture(capture, canvases, hidden)
