"""Tiny models of each family, with random weights and the published architecture.

Where ``transformers`` has the body (Qwen3, Qwen3-MoE, Qwen2, Llama, Ministral3) it is that, in eager
attention under an explicit mask. LLaDA2's is in ``llada2_model``. Each can save itself as a checkpoint
folder with the published names of keys and tensors, beside the tokenizer of the shipped checkpoint,
whose 320 ids take the place of the published ones:

    mask 4 ``<mask>``, end 1 ``<eos>`` and 6 ``<turn|>``.

Every weight is random, norms and biases too, so that one that is not loaded, or is loaded elsewhere,
changes the logits.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_diffusion.cli.checkpoint import shipped_checkpoint

VOCAB_SIZE = 320
MASK_ID = 4
END_IDS = (1, 6)
MAX_LENGTH = 1024

# Masks of one block differ by their position alone. So that their logits do, attention is sharp and
# the embedding does not drown it.
ATTENTION_GAIN = 2.0
EMBED_SCALE = 0.2
_HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")

# What all bodies have in common, unless a maker is given other ``sizes``; head_dim * heads differs
# from hidden_size, as in SDAR-4B.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": False,
}


class TinyModel:
    """A body, and how its checkpoint is written.

    Attributes:
        config: The content of ``config.json``.
        generation_config: The content of ``generation_config.json``.
        block_length: The published default at this size.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        block_length: int,
        published: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
        seed: int = 0,
        sharpness: float = 3.0,
    ) -> None:
        self.body = body.eval()
        self.config = config
        self.generation_config = generation_config
        self.block_length = block_length
        self._published = published
        randomize(body, seed=seed, sharpness=sharpness)

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
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
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


def _hugging_face_config(sizes: dict[str, Any], config_class: type, **changes: Any) -> Any:
    config = config_class(**sizes, **changes)
    config._attn_implementation = "eager"
    return config


def _auto_map(module: str, config: str, model: str, causal_lm: str | None) -> dict[str, str]:
    names = {
        "AutoConfig": f"configuration_{module}.{config}",
        "AutoModel": f"modeling_{module}.{model}",
    }
    if causal_lm:
        names["AutoModelForCausalLM"] = f"modeling_{module}.{causal_lm}"
    return names


def sdar(
    *, block_length: int = 4, seed: int = 0, sharpness: float = 3.0, **sizes: Any
) -> TinyModel:
    """SDAR and TraDo: Qwen3, with an RMSNorm over each head of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = _SIZES | sizes
    config = _hugging_face_config(
        sizes, Qwen3Config, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    return TinyModel(
        Qwen3ForCausalLM(config),
        config=sizes
        | {
            "architectures": ["SDARForCausalLM"],
            "auto_map": _auto_map("sdar", "SDARConfig", "SDARModel", "SDARForCausalLM"),
            "model_type": "sdar",
            "attention_bias": False,
            "block_size": block_length,
            "mask_token_id": MASK_ID,
            "bos_token_id": END_IDS[0],
            "eos_token_id": END_IDS[0],
            "rope_theta": 1000000,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "torch_dtype": "float32",
        },
        generation_config={"eos_token_id": list(END_IDS), "pad_token_id": 0},
        block_length=block_length,
        seed=seed,
        sharpness=sharpness,
    )


def sdar_moe(*, block_length: int = 4, seed: int = 0, sharpness: float = 3.0) -> TinyModel:
    """SDAR-MoE: Qwen3-MoE, softmax routing with normalised weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts: dict[str, Any] = {
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    config = _hugging_face_config(
        _SIZES | experts,
        Qwen3MoeConfig,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return TinyModel(
        Qwen3MoeForCausalLM(config),
        config=_SIZES
        | experts
        | {
            "architectures": ["SDARMoeForCausalLM"],
            "auto_map": _auto_map(
                "sdar_moe", "SDARMoeConfig", "SDARMoeModel", "SDARMoeForCausalLM"
            ),
            "model_type": "sdar_moe",
            "attention_bias": False,
            "block_size": block_length,
            "mask_token_id": MASK_ID,
            "bos_token_id": END_IDS[0],
            "eos_token_id": END_IDS[0],
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "torch_dtype": "float32",
        },
        generation_config={"eos_token_id": list(END_IDS), "pad_token_id": 0},
        block_length=block_length,
        published=_one_tensor_per_expert,
        seed=seed,
        sharpness=sharpness,
    )


def _one_tensor_per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take apart what ``transformers`` keeps as one tensor for all experts."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{prefix}{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}{expert}.down_proj.weight"] = down
        else:
            tensors[name] = tensor
    return tensors


def fast_dllm(
    *, block_length: int = 32, seed: int = 0, sharpness: float = 3.0, **sizes: Any
) -> TinyModel:
    """Fast-dLLM v2: Qwen2.5, with biases on queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Qwen2's heads divide the hidden size.
    sizes = {**_SIZES, "hidden_size": 128, **sizes}
    del sizes["head_dim"]
    config = _hugging_face_config(
        sizes, Qwen2Config, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    return TinyModel(
        Qwen2ForCausalLM(config),
        config=sizes
        | {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
                "AutoModel": "modeling.Fast_dLLM_QwenModel",
                "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
            },
            "model_type": "Fast_dLLM_Qwen",
            "bd_size": block_length,
            # Not in the published file, where 151665 is a default in the code; 4 must be said.
            "mask_token_id": MASK_ID,
            "bos_token_id": END_IDS[0],
            "eos_token_id": END_IDS[0],
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "torch_dtype": "float32",
        },
        generation_config={"eos_token_id": list(END_IDS), "pad_token_id": 0},
        block_length=block_length,
        seed=seed,
        sharpness=sharpness,
    )


def stable_diffcoder(
    *, block_length: int = 4, seed: int = 0, sharpness: float = 3.0, **sizes: Any
) -> TinyModel:
    """Stable-DiffCoder: Llama, no biases; its ``model_type`` is plain ``llama``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _SIZES | sizes
    config = _hugging_face_config(
        sizes, LlamaConfig, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    return TinyModel(
        LlamaForCausalLM(config),
        config=sizes
        | {
            "architectures": ["StableDiffcoderForCausalLM"],
            "auto_map": {
                "AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"
            },
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            # Neither is in the published file; the code's defaults are 5 and 4.
            "mask_token_id": MASK_ID,
            "block_size": block_length,
            "bos_token_id": 2,
            "eos_token_id": END_IDS[0],
            "rope_theta": 500000.0,
            "rope_scaling": None,
            "torch_dtype": "float32",
        },
        generation_config={"eos_token_id": END_IDS[0], "pad_token_id": 0},
        block_length=block_length,
        seed=seed,
        sharpness=sharpness,
    )


class Nemotron(TinyModel):
    """Nemotron-Labs-Diffusion: Ministral3 with YaRN, scaled queries and an untied head.

    Attributes:
        lora: Per layer ``A`` [r, in] and ``B`` [out, r] of the draft's LoRA on ``o_proj``, and the
            factor of their product, ``lora_alpha / r``.
    """

    def __init__(self, body: nn.Module, *, lora_rank: int, lora_alpha: int, **kwargs: Any) -> None:
        super().__init__(body, **kwargs)
        generator = torch.Generator().manual_seed(kwargs["seed"] + 1)
        self.lora: list[tuple[Tensor, Tensor]] = []
        self.lora_config = {
            "peft_type": "LORA",
            "target_modules": ["o_proj"],
            "r": lora_rank,
            "lora_alpha": lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        self._adapted: Tensor | None = None
        for layer in body.model.layers:
            projection = layer.self_attn.o_proj
            out_features, in_features = projection.weight.shape
            down = torch.randn(lora_rank, in_features, generator=generator) / in_features**0.5
            up = torch.randn(out_features, lora_rank, generator=generator) / lora_rank**0.5
            self.lora.append((down, 0.2 * up))
            projection.register_forward_hook(self._add_lora(len(self.lora) - 1))

    def _add_lora(self, layer: int) -> Callable[..., Tensor]:
        scale = self.lora_config["lora_alpha"] / self.lora_config["r"]

        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if self._adapted is None:
                return output
            down, up = self.lora[layer]
            return output + scale * (args[0] @ down.T @ up.T) * self._adapted[:, None]

        return hook

    def __call__(self, ids: Tensor, visible: Tensor, *, adapted: Tensor | None = None) -> Tensor:
        """[T, V]: as for every model; rows that are ``adapted``, [T] bool, run with the LoRA."""
        self._adapted = adapted
        return super().__call__(ids, visible)

    def save(self, folder: Path) -> Path:
        """The checkpoint, and the adapter in ``linear_spec_lora``."""
        super().save(folder)
        adapter = folder / "linear_spec_lora"
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps(self.lora_config, indent=2))
        tensors: dict[str, Tensor] = {}
        for layer, (down, up) in enumerate(self.lora):
            prefix = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = up
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder


def nemotron(
    *, block_length: int = 32, seed: int = 0, sharpness: float = 3.0, **sizes: Any
) -> Nemotron:
    """Nemotron-Labs-Diffusion. Its original length is 16, so that scaling acts on short prompts."""
    from transformers import Ministral3Config, Ministral3ForCausalLM

    rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    sizes = _SIZES | {"max_position_embeddings": 256, "rms_norm_eps": 1e-5} | sizes
    config = _hugging_face_config(
        sizes,
        Ministral3Config,
        rope_parameters=rope_parameters,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=END_IDS[0],
    )
    return Nemotron(
        Ministral3ForCausalLM(config),
        lora_rank=4,
        lora_alpha=16,
        config=sizes
        | {
            "architectures": ["NemotronLabsDiffusionModel"],
            "auto_map": _auto_map(
                "nemotron_labs_diffusion",
                "NemotronLabsDiffusionConfig",
                "NemotronLabsDiffusionModel",
                None,
            ),
            "model_type": "nemotron_labs_diffusion",
            "ar_loss_weight": 1.0,
            "attention_bias": False,
            "attn_implementation": "sdpa",
            "block_size": block_length,
            "bos_token_id": 2,
            "dlm_loss_weight": None,
            "dlm_paradigm": "bidirectional",
            "dp_varying_mask_ratio": False,
            "eos_token_id": END_IDS[0],
            "mask_token_id": MASK_ID,
            "mlp_bias": False,
            "rope_parameters": rope_parameters,
            "sliding_window": None,
            "torch_dtype": "float32",
        },
        generation_config={"eos_token_id": END_IDS[0], "pad_token_id": 0},
        block_length=block_length,
        published=_encoder_names,
        seed=seed,
        sharpness=sharpness,
    )


def _encoder_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        re.sub("^lm_head", "diffusion_head", re.sub("^model", "encoder", name)): tensor
        for name, tensor in state.items()
    }


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Random text tokens: no mask and no end among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(24, 280, (length,), generator=generator).tolist()


def scripted(script: Callable[[Sequence[int]], Tensor]) -> Callable[..., Tensor]:
    """A model whose logits are a function of the tokens alone: ids [T] in, [T, V] out."""

    def model(ids: Tensor, visible: Tensor, **_: Any) -> Tensor:
        return script(ids.tolist())

    return model
