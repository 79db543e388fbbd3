"""The shipped tiny SDAR: its configuration, its block-diffusion loop, how it is saved.

Tokenizer and chat template are those of the tiny DiffusionGemma (``tiny_model.py``). Keys, tensor
names and the architecture's name are SDAR's; only the sizes, the control tokens' ids and the base
of the rotary embedding differ.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tiny_model import TOKEN_ID
from tiny_qwen3 import ROPE, ROPE_THETA, SAMPLING, SIZES, TOKENS, write_files
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

BLOCK_LENGTH = 8
MASK_ID = TOKEN_ID["<mask>"]

CONFIG = {
    **SIZES,
    **TOKENS,
    "use_cache": False,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": BLOCK_LENGTH,
    "mask_token_id": MASK_ID,
    "rope_theta": ROPE_THETA,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "float32",
}

GENERATION_CONFIG = SAMPLING | {"reveal_threshold": 0.9}


def build_model() -> Qwen3ForCausalLM:
    """SDAR's body with random weights, in fp32, for explicit masks and positions."""
    config = Qwen3Config(**SIZES, rope_parameters=ROPE, use_cache=False)
    return Qwen3ForCausalLM(config).float()


def load_model(directory: Path) -> Qwen3ForCausalLM:
    """The body with the weights that :func:`save_checkpoint` wrote."""
    model = build_model()
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.eval()


def save_checkpoint(model: Qwen3ForCausalLM, directory: str | Path) -> None:
    """Write weights, configuration and tokenizer, each file moved in when complete.

    Args:
        model: What :func:`build_model` made, in fp32.
        directory: Made if absent. A reader never sees half a file.
    """
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_files(directory, tensors, CONFIG, GENERATION_CONFIG)


def hidden_states(
    model: Qwen3ForCausalLM, ids: Tensor, position: Tensor, visible: Tensor
) -> Tensor:
    """Hidden states before the head, [B, T, hidden].

    Args:
        model: Of :func:`build_model`.
        ids: Tokens, [B, T] int64.
        position: Their positions in the sequence, [B, T] int64.
        visible: Which token sees which, [B, T, T] bool.
    """
    return model.model(
        ids, attention_mask=visible[:, None], position_ids=position, use_cache=False
    ).last_hidden_state


class Generated(NamedTuple):
    """One answer.

    Attributes:
        tokens: Behind the prompt, up to and with the first end token.
        num_blocks: Blocks that were denoised.
        num_steps: Passes that revealed something, over all blocks.
    """

    tokens: list[int]
    num_blocks: int
    num_steps: int


@torch.no_grad()
def generate(model: Qwen3ForCausalLM, prompt: list[int], max_new_tokens: int = 192) -> Generated:
    """Greedy block diffusion by SDAR's dynamic rule, without a cache: what the engine does, slowly.

    A step reveals every mask whose likeliest token has more than the threshold's probability, or
    the most confident one where none has. The mask token is never taken.
    """
    C, ends = BLOCK_LENGTH, GENERATION_CONFIG["eos_token_id"]
    ids = torch.tensor(prompt)
    num_blocks = num_steps = 0
    while len(ids) < len(prompt) + max_new_tokens:
        room = C - len(ids) % C
        ids = torch.cat([ids, torch.full((room,), MASK_ID)])
        position = torch.arange(len(ids))
        visible = position[:, None] // C >= position[None, :] // C
        num_blocks += 1
        while (masked := ids[-C:] == MASK_ID).any():
            hidden = hidden_states(model, ids[None], position[None], visible[None])
            logits = model.lm_head(hidden[0, -C:])
            logits[:, MASK_ID] = float("-inf")
            confidence, tokens = logits.softmax(-1).max(-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            reveal = confidence > GENERATION_CONFIG["reveal_threshold"]
            reveal[confidence.argmax()] = True
            ids[-C:][reveal] = tokens[reveal]
            num_steps += 1
        new = ids[len(prompt) :].tolist()
        first_end = next((i for i, token in enumerate(new) if token in ends), None)
        if first_end is not None:
            return Generated(new[: first_end + 1], num_blocks, num_steps)
    return Generated(ids[len(prompt) :][:max_new_tokens].tolist(), num_blocks, num_steps)
