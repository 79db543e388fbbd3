"""Tiny random autoregressive targets, and drafts for them in the layout of z-lab's checkpoints.

Weights are large enough that no two tokens nearly tie: greedy answers can be compared by token.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from vllm_diffusion.drafting.reference import ReferenceDraft, context_rows

VOCAB = 160
HIDDEN = 64
LAYERS = 4
# Of the vocabulary, as a checkpoint's own mask token is.
MASK = VOCAB - 1
WINDOW = 32
TARGETS = ("qwen3", "llama", "gemma4")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def target_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model of ``transformers``, one of :data:`TARGETS`; Gemma 4's windows are 32
    tokens.
    """
    import transformers

    shape = _SHAPE | changes
    if kind == "gemma4":
        config = transformers.Gemma4TextConfig(
            **shape,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=shape["vocab_size"],
            num_kv_shared_layers=0,
        )
        cls = transformers.Gemma4ForCausalLM
    elif kind == "llama":
        config, cls = transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM
    else:
        config, cls = transformers.Qwen3Config(**shape), transformers.Qwen3ForCausalLM
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight.shape, torch.default_generator))
    return model


def save_target(kind: str, folder: Path, seed: int = 0) -> Path:
    """Return the folder of :func:`target_model`'s checkpoint, in float32."""
    target_model(kind, seed).save_pretrained(folder)
    return folder


def draft_config(**changes: Any) -> dict[str, Any]:
    """Return ``config.json`` of a draft with two layers, for a block of eight."""
    return {
        **_SHAPE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 8,
        "layer_types": ["full_attention"] * 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    } | changes


def random_draft(seed: int = 1, **changes: Any) -> ReferenceDraft:
    """Return the reference with random weights; ``changes`` are of its ``config.json``."""
    draft = ReferenceDraft(Qwen3Config(**draft_config(**changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    # The first draws are those of no layer.
    for name in sorted(draft.state_dict(), key=lambda name: name.startswith("layers.")):
        parameter = draft.get_parameter(name)
        parameter.data = _random(name, parameter.shape, generator)
    return draft


def save_draft(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """Return the folder of a random draft; ``changes`` are of its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(**changes)))
    save_file(random_draft(seed, **changes).state_dict(), folder / "model.safetensors")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        # Norms, and Gemma 4's scalar of a layer.
        return 1 + 0.1 * noise
    if "lm_head" in name:
        # A few tokens are said often, so that a random draft is right at times; and the mask would
        # be.
        noise *= torch.randn(shape[0], 1, generator=generator).exp()
        # The mask token is the last.
        noise[-1] *= 3
        return noise
    return noise * (1.0 if "embed" in name else 1.5 / shape[-1] ** 0.5)


def greedy_tokens(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return greedy tokens of ``transformers``, computed once for each model, whose weights
    stay.
    """
    return list(_greedy_tokens(model, tuple(prompt), max_tokens))


@cache
def _greedy_tokens(model: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


def features(model: Any, tokens: list[int], layer_ids: Sequence[int]) -> Tensor:
    """[num_tokens, num_layers * hidden_size]: what a draft reads of ``transformers``' target."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return context_rows(states, layer_ids)[0]


def block_rows(draft: ReferenceDraft, embeddings: Tensor, context: Tensor) -> Tensor:
    """[width, hidden_size]: a block's last hidden rows, in one forward without a cache.

    Args:
        draft: The reference.
        embeddings: [width, hidden_size], of the block's tokens.
        context: [num_tokens, num_layers * hidden_size], :func:`features` of what is before it.
    """
    known = torch.arange(len(context))[None]
    positions = len(context) + torch.arange(len(embeddings))[None]
    anchors = torch.full_like(positions, len(context))
    with torch.no_grad():
        keys_values = draft.context(context[None], known)
        return draft(embeddings[None], positions, anchors, keys_values, known)[0]
