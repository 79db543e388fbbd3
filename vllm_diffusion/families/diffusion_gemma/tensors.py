"""Names and shapes of DiffusionGemma's tensors, as ``transformers`` would write them.

Encoder and decoder share their text layers. A checkpoint stores what they share once, under either
one's name; the decoder's is canonical. Only ``layer_scalar`` is stored for both.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_diffusion.weights.tensor_rules import Shape, TensorRules

ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."


class DiffusionGemmaTensors(TensorRules):
    """Tensor rules of the model that ``transformers`` makes of a configuration."""

    has_fused_experts = True

    def shapes(self, config: Any) -> dict[str, Shape]:
        from transformers import DiffusionGemmaForBlockDiffusion

        with torch.device("meta"):
            model = DiffusionGemmaForBlockDiffusion(config)
        tensors = model.state_dict()
        shapes = {self.canonical_name(name): tuple(t.shape) for name, t in tensors.items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        size = getattr(config, "self_conditioning_size", None)
        if size is not None:
            hidden = config.text_config.hidden_size
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, size) if name == "down_proj" else (size, hidden)
                shapes[f"{DECODER}self_conditioning.{name}.weight"] = shape
        return shapes

    def canonical_name(self, name: str) -> str:
        if name.startswith(ENCODER) and not name.endswith(".layer_scalar"):
            return DECODER + name.removeprefix(ENCODER)
        return name

    def all_names(self, name: str) -> tuple[str, ...]:
        if name.startswith(DECODER) and "self_conditioning" not in name:
            return name, ENCODER + name.removeprefix(DECODER)
        return (name,)

    def copy_of(self, name: str) -> str:
        """A layer's scalar is the encoder's and the decoder's; one of the two is enough."""
        if not name.endswith(".layer_scalar"):
            return name
        if name.startswith(DECODER):
            return ENCODER + name.removeprefix(DECODER)
        return DECODER + name.removeprefix(ENCODER)
