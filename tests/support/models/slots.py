"""Slots that hold requests, a pass over all of them, and what a model predicts there."""

from typing import Any

import torch
from torch import Tensor

from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.canvas.step import SlotInputs
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.rule import DecodingRule, PositionStatistics
from vllm_diffusion.requests.arguments import RequestArguments

CPU, VOCAB = torch.device("cpu"), 50
# A request without arguments.
PLAIN = NewRequest(RequestArguments())


def slots_of(
    spec: CanvasSpec, *requests: NewRequest, vocab_size: int = VOCAB, device: torch.device = CPU
) -> CanvasSlots:
    """Return as many slots as there are requests, each with one of them."""
    slots = CanvasSlots(len(requests), spec, vocab_size, device)
    for slot, request in enumerate(requests):
        slots.add_request(slot, request)
    slots.apply_staged_writes()
    return slots


def slot_inputs(num_slots: int, width: int = 0, **changes: Tensor) -> SlotInputs:
    """Describe a pass in which every slot has ``width`` rows and no constraint."""
    plain = {
        "num_rows": torch.full((num_slots,), width, dtype=torch.int32),
        "seed": torch.zeros(num_slots, dtype=torch.int64),
        "greedy": torch.zeros(num_slots, dtype=torch.bool),
        "last_known": torch.zeros(num_slots, dtype=torch.bool),
        "num_valid": torch.full((num_slots,), -1, dtype=torch.int32),
        "free_from": torch.zeros(num_slots, dtype=torch.int32),
        "free_to": torch.zeros(num_slots, dtype=torch.int32),
    }
    return SlotInputs(**(plain | changes))


def predicted(tokens: Any, entropy: Tensor | None = None) -> PositionStatistics:
    """Return the statistics of a model that predicts these tokens, with certainty by default."""
    drawn = torch.as_tensor(tokens)
    entropy = torch.zeros(drawn.shape) if entropy is None else entropy
    return PositionStatistics(drawn, drawn, entropy, entropy)


def predicted_at_random(slots: CanvasSlots, generator: torch.Generator) -> PositionStatistics:
    """Return the statistics of a model that predicts random tokens, as the slots' rule needs."""
    R, C = slots.canvas.shape
    choices = torch.rand(R, C, VOCAB, generator=generator).argsort(dim=-1)[..., :3]
    confidence = torch.rand(R, C, generator=generator)
    has_choices = slots.spec.ways[0].rule.num_choices > 0
    return PositionStatistics(
        argmax=choices[..., 0],
        candidate=choices[..., 0] if has_choices else choices[..., 1],
        entropy=confidence,
        drawn_confidence=confidence,
        confidence=confidence if has_choices else None,
        choices=choices if has_choices else None,
    )


def reveal_settings(rule: DecodingRule, **changes: Any) -> dict[str, Any]:
    """Return settings with which a masked rule takes a few steps."""
    values = {
        "reveal_threshold": 0.7,
        "strategy": "dynamic",
        "editing_threshold": 0.3,
        "max_post_steps": 2,
        "reveal_steps": 4,
        **rule.defaults,
        **changes,
    }
    return {name: values[name] for name in rule.settings}
