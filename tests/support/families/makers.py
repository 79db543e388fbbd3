"""Tiny models of each family, with the published architecture.

Where ``transformers`` has the body (Qwen3, Qwen3-MoE, Qwen2, Llama, Ministral3) it is that, in
eager attention under an explicit mask. LLaDA2's is in ``llada2_model``.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.families.model import END_IDS, Maker, TinyModel
from tests.support.families.published import files_of
from tests.support.models.checkpoints import with_single_experts


def transformers_body(name: str) -> Callable[[dict[str, Any]], nn.Module]:
    """Makes that class under its own configuration, which reads the published keys."""

    def body(config: dict[str, Any]) -> nn.Module:
        import transformers

        own = ("architectures", "auto_map", "model_type", "attn_implementation")
        settings = getattr(transformers, f"{name}Config")(
            **{key: value for key, value in config.items() if key not in own}
        )
        settings._attn_implementation = "eager"
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(settings)
        return model

    return body


def _encoder_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        re.sub("^lm_head", "diffusion_head", re.sub("^model", "encoder", name)): tensor
        for name, tensor in state.items()
    }


# SDAR and TraDo: Qwen3, with an RMSNorm over each head of queries and keys. The heads together are
# wider than the hidden size, as in SDAR-4B.
sdar = Maker(
    transformers_body("Qwen3"),
    4,
    {"head_dim": 32},
    eos_token_id=list(END_IDS),
    file=("JetLM/SDAR-8B-Chat",),
)

# SDAR-MoE: Qwen3-MoE, softmax routing with normalised weights.
sdar_moe = replace(
    sdar,
    body=transformers_body("Qwen3Moe"),
    config=sdar.config | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    file=("JetLM/SDAR-30B-A3B-Chat",),
    published=with_single_experts,
)

# DreamReasoner: Qwen3 by Dream's name; its ``head_dim`` is null, and the heads divide the hidden
# size.
dream_reasoner = replace(
    sdar,
    body=lambda config: transformers_body("Qwen3")(config | {"head_dim": 32}),
    block_length=32,
    config=sdar.config
    | {
        "architectures": ["DreamForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamForCausalLM",
            "AutoModelForCausalLM": "modeling_dream.DreamForCausalLM",
        },
        "model_type": "Dream",
        "hidden_size": 128,
        "head_dim": None,
    },
    eos_token_id=END_IDS[0],
)

# A2D: Qwen3, with one matrix for embedding and head as in Qwen3-0.6B.
a2d = replace(
    sdar,
    block_length=32,
    config=sdar.config
    | {
        "architectures": ["A2DQwen3LMHeadModel"],
        "auto_map": {},
        "model_type": "a2d-qwen3",
    },
)

# The other bodies that its trainer converts.
a2d_qwen2 = replace(
    a2d,
    body=transformers_body("Qwen2"),
    file=(),
    config={
        "architectures": ["A2DQwen2LMHeadModel"],
        "auto_map": {},
        "model_type": "a2d-qwen2",
        "hidden_size": 128,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
)
a2d_llama = replace(
    a2d,
    body=transformers_body("Llama"),
    file=(),
    config={
        "architectures": ["A2DLlamaLMHeadModel"],
        "auto_map": {},
        "model_type": "a2d-llama",
        "head_dim": 32,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    },
)

# Fast-dLLM v2: Qwen2.5, with biases on queries, keys and values; its heads divide the hidden size.
fast_dllm = Maker(
    transformers_body("Qwen2"),
    32,
    {"hidden_size": 128},
    block_length_key="bd_size",
    eos_token_id=list(END_IDS),
    file=("Efficient-Large-Model/Fast_dLLM_v2_7B",),
)

# What a trainer of its objective makes of a Qwen3: the autoregressive model's ``config.json``.
fast_dllm_qwen3 = replace(
    sdar,
    block_length=32,
    file=(),
    config={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "mask_token_id": None,
        "head_dim": 32,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    block_length_key=None,
    eos_token_id=list(END_IDS),
)

# Stable-DiffCoder: Llama, no biases; its ``model_type`` is plain ``llama``.
stable_diffcoder = Maker(
    transformers_body("Llama"),
    4,
    {
        "architectures": ["StableDiffcoderForCausalLM"],
        "auto_map": {
            "AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"
        },
        "head_dim": 32,
        "bos_token_id": 2,
    },
    file=("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "d0808fa"),
)


class LLaDA(TinyModel):
    """LLaDA: Llama, under names of its own."""

    # Names of a Llama, to the published ones.
    fields: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "hidden_act": "activation_type",
        "tie_word_embeddings": "weight_tying",
    }

    def __init__(self, maker: Maker, config: dict[str, Any], block_length: int) -> None:
        super().__init__(maker, config, block_length)
        config = {self.fields.get(name, name): value for name, value in config.items()}
        self.config = config | {"embedding_size": config["vocab_size"]}

    @staticmethod
    def published_name(name: str) -> str:
        """The published name of a tensor or a module."""
        at = "model.transformer."
        names = {
            "lm_head": f"{at}ff_out",
            "model.embed_tokens": f"{at}wte",
            "model.norm": f"{at}ln_f",
            "model.layers": f"{at}blocks",
            "self_attn.o_proj": "attn_out",
            "self_attn.": "",
            "mlp.down_proj": "ff_out",
            "mlp.gate_proj": "ff_proj",
            "mlp.": "",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ff_norm",
        }
        for own, published in names.items():
            name = name.replace(own, published)
        return name

    @classmethod
    def published(cls, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their published names."""
        return {cls.published_name(name): tensor for name, tensor in state.items()}


# iLLaDA: Llama, with one matrix for embedding and head.
illada = Maker(
    transformers_body("Llama"),
    16,
    {
        "architectures": ["ILLaDAForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_illada.ILLaDAConfig",
            "AutoModelForCausalLM": "modeling_illada.ILLaDAForCausalLM",
        },
        "model_type": "illada",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    },
    block_length_key=None,
)

# Dream: Qwen2.5, with biases on queries, keys and values.
dream = Maker(
    transformers_body("Qwen2"),
    32,
    {"hidden_size": 128},
    block_length_key=None,
    file=("Dream-org/Dream-v0-Instruct-7B",),
)


class CoDA(TinyModel):
    """CoDA: Qwen3 with a head of its own, of which ``config.json`` says nothing."""

    def __init__(self, maker: Maker, config: dict[str, Any], block_length: int) -> None:
        super().__init__(maker, config, block_length)
        del config["tie_word_embeddings"]
        published = files_of(*maker.file).files["generation_config.json"]
        self.generation_config |= {name: published[name] for name in _UNREAD}


# Settings of CoDA's ``generation_config.json`` that its loop does not read.
_UNREAD = ("alg", "alg_temp", "diffusion_steps", "eps", "max_tokens")

coda = Maker(
    transformers_body("Qwen3"),
    32,
    {"hidden_size": 128, "head_dim": 32},
    block_length_key=None,
    file=("Salesforce/CoDA-v0-Instruct",),
    kind=CoDA,
)

llada = Maker(
    transformers_body("Llama"),
    16,
    {"num_key_value_heads": 4},
    block_length_key=None,
    file=("GSAI-ML/LLaDA-8B-Instruct",),
    published=LLaDA.published,
    kind=LLaDA,
)


class LLaDAMoE(TinyModel):
    """LLaDA-MoE: Qwen3-MoE without normalized weights of experts, under names of its own."""

    def __init__(self, maker: Maker, config: dict[str, Any], block_length: int) -> None:
        super().__init__(maker, config, block_length)
        own = ("intermediate_size", "moe_intermediate_size", "mlp_only_layers", "head_dim")
        self.config = {name: value for name, value in config.items() if name not in own} | {
            "dense_intermediate_size": config["intermediate_size"],
            "expert_intermediate_size": config["moe_intermediate_size"],
            "shared_expert_intermediate_size": None,
            "moe_layer_freq": [
                int(i not in config["mlp_only_layers"]) for i in range(config["num_hidden_layers"])
            ],
            "moe_router_enable_expert_bias": False,
            "norm_topk_prob": None,
            "qk_layernorm": True,
            "partial_rotary_factor": 1,
        }


llada_moe = Maker(
    transformers_body("Qwen3Moe"),
    16,
    {
        "architectures": ["LLaDAMoEModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_lladamoe.LLaDAMoEConfig",
            "AutoModel": "modeling_lladamoe.LLaDAMoEModelLM",
        },
        "model_type": "lladamoe",
        "hidden_size": 128,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "attention_bias": False,
        "rope_theta": 50000.0,
        "rope_scaling": None,
    },
    block_length_key=None,
    published=with_single_experts,
    kind=LLaDAMoE,
)


class SelfDrafting(TinyModel):
    """A model with a LoRA for its drafts.

    Attributes:
        lora: Per adapted module of the body ``A`` [r, in] and ``B`` [out, r]; the factor of their
            product is ``lora_alpha / r``.
        folder: Where a checkpoint has the adapter.
        targets: Modules that it adapts.
        options: Options of an engine that it needs.
    """

    options: ClassVar[dict[str, Any]] = {}
    folder: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]
    alpha: ClassVar[int]

    @property
    def lora_config(self) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA",
            "target_modules": list(self.targets),
            "r": 4,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def randomize(self, seed: int, sharpness: float) -> None:
        """The body's weights, then the LoRA's."""
        super().randomize(seed, sharpness)
        generator, rank = torch.Generator().manual_seed(seed + 1), self.lora_config["r"]
        self.lora: dict[str, tuple[Tensor, Tensor]] = {}
        self._adapted: Tensor | None = None
        for name, module in self.body.named_modules():
            if name.endswith(self.targets):
                out_features, in_features = module.weight.shape
                down = torch.randn(rank, in_features, generator=generator) / in_features**0.5
                up = torch.randn(out_features, rank, generator=generator) / rank**0.5
                self.lora[name] = (down, 0.2 * up)
                module.register_forward_hook(self._add_lora(name))

    def _add_lora(self, name: str) -> Callable[..., Tensor]:
        scale = self.alpha / self.lora_config["r"]

        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if self._adapted is None:
                return output
            down, up = self.lora[name]
            return output + scale * (args[0] @ down.T @ up.T) * self._adapted[:, None]

        return hook

    def __call__(self, ids: Tensor, visible: Tensor, *, adapted: Tensor | None = None) -> Tensor:
        """[T, V]: as for every model; rows that are ``adapted``, [T] bool, run with the LoRA."""
        self._adapted = adapted
        return super().__call__(ids, visible)

    def save(self, folder: Path) -> Path:
        """The checkpoint, and the adapter in its folder."""
        super().save(folder)
        adapter = folder / self.folder
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps(self.lora_config, indent=2))
        halves = {
            f"{name}.lora_{half}.weight": tensor
            for name, pair in self.lora.items()
            for half, tensor in zip("AB", pair, strict=True)
        }
        tensors = {f"base_model.model.{name}": one for name, one in self._published(halves).items()}
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder


class Nemotron(SelfDrafting):
    """Nemotron-Labs-Diffusion: Ministral3 with YaRN, scaled queries and an untied head."""

    folder, targets, alpha = "linear_spec_lora", ("o_proj",), 16


class Uno(SelfDrafting):
    """Qwen3, all of whose projections are adapted in drafts, by the published factor of 16."""

    folder, alpha = "adapter", 64
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# Uno: the published bundle has SDAR's class; drafts start from tokens before the mask.
uno = replace(sdar, config=sdar.config | {"mask_token_id": 300}, kind=Uno)


class _GroupedNorm(nn.Module):
    """RMSNorm of each of several groups of channels."""

    def __init__(self, size: int, num_groups: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.num_groups, self.epsilon = num_groups, epsilon

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1))
        normed = nn.functional.rms_norm(groups, groups.shape[-1:], eps=self.epsilon)
        return self.weight * normed.flatten(-2)


def k2_horizon_body(config: dict[str, Any]) -> nn.Module:
    """Make a dense K2-Horizon: a Llama with norms of groups, and heads that are rotated in part.

    The rotated channels are the first of each half of a head; the others turn by no angle.
    """
    model: Any = transformers_body("Llama")(config)
    rotated, theta = config["rope_head_dim"], config["rope_parameters"]["rope_theta"]
    angles = theta ** -(torch.arange(0, rotated, 2) / rotated)
    still = torch.zeros(config["head_dim"] // 2 - len(angles))
    model.model.rotary_emb.inv_freq = torch.cat([angles, still])
    groups = config["hidden_size"], config["layernorm_num_groups"], config["rms_norm_eps"]
    model.model.norm = _GroupedNorm(*groups)
    for layer in model.model.layers:
        layer.input_layernorm = _GroupedNorm(*groups)
        layer.post_attention_layernorm = _GroupedNorm(*groups)
    return model  # type: ignore[no-any-return]


class UnoK2Horizon(Uno):
    """K2-Horizon, with its marks of thought; its configuration class is code of its repository."""

    options: ClassVar[dict[str, Any]] = {
        "trust_remote_code": True,
        "hf_overrides": {"architectures": ["UnoK2HorizonForCausalLM"]},
    }

    def save(self, folder: Path) -> Path:
        """The checkpoint, with that code and these marks."""
        super().save(folder)
        path = folder / "tokenizer.json"
        text = path.read_text().replace("<unused0>", "<ifm|think>")
        path.write_text(text.replace("<unused1>", "</ifm|think>"))
        (folder / "configuration_k2_horizon.py").write_text(
            "from transformers import PretrainedConfig\n\n\n"
            "class K2HorizonConfig(PretrainedConfig):\n"
            '    model_type = "k2_horizon"\n'
        )
        return folder


# K2-Horizon: without a mask token, and here with the partial rotation that no published one has.
uno_k2 = Maker(
    k2_horizon_body,
    9,
    {
        "architectures": ["K2HorizonForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_k2_horizon.K2HorizonConfig"},
        "model_type": "k2_horizon",
        "mask_token_id": None,
        "head_dim": 32,
        "rope_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention_bias": False,
        "attention_gate_func": None,
        "layernorm_num_groups": 2,
        "query_key_norm": False,
        "num_experts": 0,
        "mova_num_experts": 0,
    },
    block_length_key=None,
    kind=UnoK2Horizon,
)

# Nemotron-Labs-Diffusion: its original length is 16, so that scaling acts on short prompts.
nemotron = Maker(
    transformers_body("Ministral3"),
    32,
    {
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": files_of("nvidia/Nemotron-Labs-Diffusion-8B").config["rope_parameters"]
        | {"original_max_position_embeddings": 16},
    },
    file=("nvidia/Nemotron-Labs-Diffusion-8B",),
    published=_encoder_names,
    kind=Nemotron,
)

# RND1: Qwen3-MoE, whose class writes false for what Qwen3-MoE has as null.
rnd1 = replace(
    sdar_moe,
    body=lambda config: transformers_body("Qwen3Moe")(
        config | {"rope_scaling": None, "sliding_window": None}
    ),
    config=sdar_moe.config
    | {
        "architectures": ["RND1LM"],
        "auto_map": {
            "AutoConfig": "configuration_rnd.RND1Config",
            "AutoModel": "modeling_rnd.RND1Model",
            "AutoModelForMaskedLM": "modeling_rnd.RND1LM",
        },
        "model_type": "rnd1",
        "hidden_size": 128,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "is_causal": False,
        "mlp_only_layers": [],
        "moe_backend": "hf",
        "norm_topk_prob": True,
        "num_diffusion_steps": 256,
        "rope_scaling": False,
        "rope_theta": 1000000.0,
        "sliding_window": False,
        "use_sliding_window": False,
    },
    block_length_key=None,
    eos_token_id=END_IDS[0],
    file=(),
)
