"""What the families' tiny models share: random weights, eager attention, and how each is saved.

A model can save itself as a checkpoint folder with the published names of keys and tensors, with
the tokenizer of the shipped checkpoint, whose 320 ids replace the published ones:

    mask 4 ``<mask>``, end 1 ``<eos>`` and 6 ``<turn|>``.

Every weight is random, norms and biases too, so that one that is not loaded, or is loaded
elsewhere, changes the logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.families.published import files_of
from vllm_diffusion.checkpoints import shipped_checkpoint

VOCAB_SIZE = 320
MASK_ID = 4
END_IDS = (1, 6)
MAX_LENGTH = 1024

# Masks of one block differ by their position alone. So that their logits do, attention is sharp and
# the embedding does not drown it.
ATTENTION_GAIN = 2.0
EMBED_SCALE = 0.2
_HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")

# Sizes, and ids of the toys' vocabulary. Published files of SDAR, LLaDA2 and Fast-dLLM v2 have no
# ``mask_token_id``, and no publisher's code has 4 as its default.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": False,
    "mask_token_id": MASK_ID,
    "bos_token_id": END_IDS[0],
    "eos_token_id": END_IDS[0],
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
# Fields of published files that say what a toy's ``torch_dtype`` does, by what it was saved, or one
# thing for each layer.
_NOT_TAKEN = ("dtype", "transformers_version", "_name_or_path", "layer_types")


class TinyModel:
    """A body, and how its checkpoint is written.

    Attributes:
        config: The content of ``config.json``.
        generation_config: The content of ``generation_config.json``.
        block_length: The published default at this size.
    """

    def __init__(self, maker: Maker, config: dict[str, Any], block_length: int) -> None:
        # A copy, since transformers' configuration may change what it is given.
        self.body = maker.body(deepcopy(config)).eval()
        self.config = config
        self.generation_config = {"eos_token_id": maker.eos_token_id, "pad_token_id": 0}
        self.block_length = block_length
        self._published = maker.published

    def randomize(self, seed: int, sharpness: float) -> None:
        """Fill every parameter and saved buffer."""
        randomize(self.body, seed=seed, sharpness=sharpness)

    @torch.no_grad()
    def __call__(self, ids: Tensor, visible: Tensor) -> Tensor:
        """[T, V], float32: the logits of a whole sequence."""
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        return self.body(ids[None], attention_mask=bias[None, None], use_cache=False).logits[0]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its published name."""
        return self._published(self.body.state_dict())

    def save(self, folder: Path) -> Path:
        """Write a checkpoint folder, as the publisher lays it out."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(shipped_checkpoint() / name, folder / name)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        (folder / "generation_config.json").write_text(json.dumps(self.generation_config, indent=2))
        is_tied = self.config.get("tie_word_embeddings")
        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.tensors().items()
            if not (is_tied and name == "lm_head.weight")
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@torch.no_grad()
def randomize(body: nn.Module, *, seed: int, sharpness: float) -> None:
    """Fill every parameter and saved buffer.

    Args:
        body: What is filled.
        seed: Of the weights.
        sharpness: Standard deviation of the logits: probabilities of the most likely token are
            around 0.1 at 3 and around 0.9 at 12.
    """
    generator = torch.Generator().manual_seed(seed)
    state = body.state_dict()
    has_head_norms = any(name.split(".")[-2] in _HEAD_NORMS for name in state)
    for name, tensor in sorted(state.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        module = name.split(".")[-2]
        if module in _HEAD_NORMS:
            tensor.copy_(ATTENTION_GAIN + 0.1 * noise)
        elif name.endswith("norm.weight"):
            tensor.copy_(1 + 0.1 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.1 * noise)
        elif "embed" in module:
            tensor.copy_(EMBED_SCALE * noise)
        else:
            gain = {"lm_head": sharpness, "diffusion_head": sharpness}.get(module, 1.0)
            if module in ("q_proj", "k_proj") and not has_head_norms:
                gain = ATTENTION_GAIN
            tensor.copy_(noise * gain / tensor.shape[-1] ** 0.5)


@dataclass(frozen=True)
class Maker:
    """Makes a family's tiny model.

    Attributes:
        body: Makes it of the content of ``config.json``.
        block_length: Of a model that is made without one, as published.
        config: Sizes in ``config.json`` besides those of all families; where no file was found, its
            other keys too.
        file: Id of the checkpoint whose published ``config.json`` it begins from, and revision.
        block_length_key: What ``config.json`` calls the block's length; ``None`` where it has none.
        eos_token_id: In ``generation_config.json``.
        published: From the body's names of tensors to the checkpoint's.
        kind: What holds the body.
    """

    body: Callable[[dict[str, Any]], nn.Module]
    block_length: int
    config: dict[str, Any]
    block_length_key: str | None = "block_size"
    eos_token_id: int | list[int] = END_IDS[0]
    published: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    kind: type[TinyModel] = TinyModel
    file: tuple[str, ...] = ()

    def __call__(
        self,
        *,
        block_length: int | None = None,
        seed: int = 0,
        sharpness: float = 3.0,
        **sizes: int,
    ) -> Any:
        """One with random weights, where ``sizes`` replace those in ``config.json``."""
        block_length = block_length or self.block_length
        found = files_of(*self.file).config if self.file else {}
        taken = {name: value for name, value in found.items() if name not in _NOT_TAKEN}
        config = taken | _COMMON | self.config | sizes
        if self.block_length_key:
            config[self.block_length_key] = block_length
        model = self.kind(self, config, block_length)
        model.randomize(seed, sharpness)
        return model


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Random text tokens: no mask and no end among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(24, 280, (length,), generator=generator).tolist()


def scripted(script: Callable[[Sequence[int]], Tensor]) -> Callable[..., Tensor]:
    """A model whose logits are a function of the tokens alone: ids [T] in, [T, V] out."""

    def model(ids: Tensor, visible: Tensor, **_: Any) -> Tensor:
        return script(ids.tolist())

    return model
