"""A sampler with its canvases as serving makes them, without an engine: random weights of a served shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.specs import diffusion_gemma_spec
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.canvas.step import CanvasStep
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.requests.arguments import RequestArguments
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.sampler import DiffusionSampler


@dataclass(frozen=True)
class StepShape:
    """Shape of the model and of the server, as far as sampling goes.

    Attributes:
        spec: Canvases and their rule.
        vocab: Ids of the vocabulary.
        hidden: Hidden size.
        slots: Requests that run at once.
        softcap: Cap of the logits; ``None`` without one.
        dtype: Name of the weights' dtype in torch.
        is_self_conditioned: True if steps leave soft embeddings.
    """

    spec: CanvasSpec = field(default_factory=lambda: diffusion_gemma_spec(256), repr=False)
    vocab: int = 262144
    hidden: int = 2816
    slots: int = 32
    softcap: float | None = 30.0
    dtype: str = "bfloat16"
    is_self_conditioned: bool = True


class StepServer:
    """Sampler and canvases of a worker, without a backbone.

    Attributes:
        sampler: The sampler.
        slots: Its canvases.
        soft_embeds: [slots, canvas, hidden], what the last step left for self-conditioning.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        """Make them of random weights.

        Args:
            shape: What is served.
            device: Where the tensors are.
        """
        self.shape = shape
        self.device = device
        self._dtype = getattr(torch, shape.dtype)
        self._generator = torch.Generator(device).manual_seed(0)
        weight = self.random(shape.vocab, shape.hidden) * 0.2
        spec = shape.spec
        self.slots = CanvasSlots(shape.slots, spec, shape.vocab, device)
        self.soft_embeds = torch.zeros(
            shape.slots, spec.length, shape.hidden, dtype=self._dtype, device=device
        )
        head = OutputHead(
            weight=weight,
            embedding=weight if shape.is_self_conditioned else None,
            first_id=0,
            softcap=shape.softcap,
            dtype=self._dtype,
            matmul=F.linear,
            num_shards=1,
            shard_size=shape.vocab,
        )
        self.pass_rows = PassRows(self.slots, shape.slots * spec.length, None)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=self.device)

        # What a captured step reads of vLLM's state.
        stock = SimpleNamespace(
            sampling_states=None,
            logprob_token_ids_state=None,
            penalties_state=SimpleNamespace(
                prompt_bin_mask=zeros(shape.slots, -(-shape.vocab // 32)),
                output_bin_counts=zeros(shape.slots, shape.vocab),
            ),
            req_states=SimpleNamespace(
                prompt_len=None, num_computed_tokens=SimpleNamespace(gpu=zeros(shape.slots) + 7)
            ),
            logprobs_mode="raw_logprobs",
        )
        step = CanvasStep(self.slots, compile_backend=None)
        self.sampler = DiffusionSampler(stock, self.pass_rows, step, head, self._store, 20)
        self.pass_rows.of_slots.seed.copy_(torch.arange(shape.slots) + 40)

    def _store(self, soft_embeds: Tensor, slot: Tensor, position: Tensor) -> None:
        self.soft_embeds[slot, position] = soft_embeds.to(self.soft_embeds.dtype)

    def random(self, *shape: int) -> Tensor:
        """Normally distributed, in the model's dtype."""
        return torch.randn(*shape, generator=self._generator, device=self.device).to(self._dtype)

    def begin(self, canvases: int) -> None:
        """Put new requests into all slots, the first of which denoise; every canvas is noise."""
        for slot in range(self.shape.slots):
            self.slots.add_request(slot, NewRequest(RequestArguments(), prompt_len=7))
        self.slots.apply_staged_writes()
        noise = torch.Generator(self.device).manual_seed(1)
        self.slots.canvas.random_(0, self.shape.vocab, generator=noise)
        self.soft_embeds.zero_()
        self.lay_out(canvases)

    def lay_out(self, canvases: int) -> None:
        """A pass in which so many slots denoise."""
        C = self.slots.canvas_length
        starts = np.arange(canvases + 1) * C
        seven = np.full(canvases, 7)
        self.pass_rows.lay_out(
            SimpleNamespace(
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

    def state(self) -> dict[str, Tensor]:
        """Everything that a step may write, copied."""
        slots = vars(self.slots)
        found = {name: value for name, value in slots.items() if isinstance(value, Tensor)}
        found |= self.slots.rule_memory | {"soft embeddings": self.soft_embeds}
        return {name: value.clone() for name, value in found.items()}
