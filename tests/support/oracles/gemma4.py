"""A DiffusionGemma's encoder, head and softcap in transformers' Gemma 4: its autoregressive
oracle.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_ENCODER, _DECODER = "model.encoder.language_model.", "model.decoder."


def encoder_as_gemma4(checkpoint: Path) -> Any:
    """``Gemma4ForCausalLM`` in float32 with a checkpoint's encoder; no tensor is missing or left
    over.

    What both stacks share is stored under the decoder's names, but ``layer_scalar`` is the
    encoder's own.
    """
    from transformers import DiffusionGemmaConfig, Gemma4ForCausalLM, Gemma4TextConfig

    text = DiffusionGemmaConfig.from_pretrained(checkpoint).text_config.to_dict()
    own = {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "dtype": torch.float32,
    }
    for name in ("model_type", "architectures", "transformers_version"):
        text.pop(name, None)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**(text | own))).eval()
    stored = load_file(checkpoint / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for prefix in (_DECODER, _ENCODER):
        for name, value in stored.items():
            if name.startswith(prefix) and "self_conditioning" not in name:
                tensors["model." + name.removeprefix(prefix)] = value.float()
    found = model.load_state_dict(tensors, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"}, found.missing_keys
    assert not found.unexpected_keys
    model.tie_weights()
    return model


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Return logits [len(ids), vocab_size], float32, softcapped."""
    found: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return found
