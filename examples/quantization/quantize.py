"""Turn a BF16 DiffusionGemma checkpoint into FP8 or NVFP4, with compressed-tensors' own tools.

    python examples/quantization/quantize.py fp8-dynamic OUTPUT python
    examples/quantization/quantize.py nvfp4 OUTPUT --checkpoint CHECKPOINT --prompts PROMPTS.txt

What is quantised, and under which names, follows the published FP8-dynamic checkpoint as far as it
is known: attention, dense MLPs and experts, each expert with matrices of its own; not the head, the
embeddings, the routers, the self-conditioning module and the vision tower. The published NVFP4
checkpoint's config is not known here: ``nvfp4`` quantises the same modules, weights and
activations.

``fp8-static`` and ``nvfp4`` calibrate the range of each module's input by generating answers to
prompts (one user message a line; without ``--prompts``, the tiny checkpoint's training tasks).
The whole checkpoint is held in memory, about 1.5 times over.
"""

import argparse
import json
import random
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    QuantizationStrategy,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.version import version as compressed_tensors_version
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

# What the tiny checkpoints are trained on.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoints"))

from tiny_tasks import FAMILIES, draw_training_example

from vllm_diffusion.checkpoints import shipped_checkpoint

# Scheme -> compressed-tensors' preset and the format it writes.
SCHEMES = {
    "fp8-dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "fp8-static": ("FP8", "float-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
    "nvfp4-weights": ("NVFP4A16", "nvfp4-pack-quantized"),
}
# What the range of a group of NVFP4 is cut to, at most as much as helps.
GROUP_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_ENCODER, _DECODER = "model.encoder.language_model.", "model.decoder."
_SHARED_MODULES = ("self_attn", "mlp", "router", "experts")


class SplitExperts(nn.Module):
    """The model's fused experts as linear modules, one set for each expert.

    Takes the fused module's parameters over; their memory is shared.
    """

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        for idx in range(fused.num_experts):
            gate, up = fused.gate_up_proj.data[idx].chunk(2)
            expert = nn.Module()
            matrices = {"gate_proj": gate, "up_proj": up, "down_proj": fused.down_proj.data[idx]}
            for name, weight in matrices.items():
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                linear.weight = nn.Parameter(weight, requires_grad=False)
                expert.add_module(name, linear)
            self.add_module(str(idx), expert)

    def forward(self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """[num_tokens, hidden_size], [num_tokens, top_k] twice -> [num_tokens, hidden_size]."""
        output = torch.zeros_like(hidden)
        for idx, expert in self.named_children():
            if not idx.isdecimal():
                continue
            token_idx, choice = torch.where(expert_ids == int(idx))
            # compressed-tensors quantises activations of [batch, tokens, size].
            rows = hidden[None, token_idx]
            rows = expert.down_proj(self.act_fn(expert.gate_proj(rows)) * expert.up_proj(rows))
            rows = rows[0] * expert_weights[token_idx, choice, None]
            output.index_add_(0, token_idx, rows.to(output.dtype))
        return output


def share_modules(model: nn.Module) -> None:
    """Make encoder and decoder use the same linear modules, with split experts.

    Their parameters are tied already. Shared modules are calibrated by both passes, and are
    quantised once.
    """
    encoder, decoder = model.model.encoder.language_model, model.model.decoder
    for theirs, ours in zip(encoder.layers, decoder.layers, strict=True):
        ours.experts = SplitExperts(ours.experts)
        theirs.experts = ours.experts
        for (name, linear), (_, tied) in zip(
            list(theirs.named_modules()), list(ours.named_modules()), strict=True
        ):
            if isinstance(linear, nn.Linear) and linear is not tied:
                owner = theirs.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], tied)


def ignored_modules(model: nn.Module) -> list[str]:
    """Names of the linear modules that stay as they are, in the order of the model."""
    kept = ("router.proj", "vision_tower", "embed_vision", "self_conditioning", "lm_head")
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in kept)
    ]


def calibrate(model: nn.Module, prompts: Iterable[Tensor]) -> dict[nn.Module, Tensor]:
    """Largest magnitude that enters each linear module while the prompts are answered.

    Args:
        model: With shared modules.
        prompts: Token ids, [1, num_tokens] each; a canvas is generated for each.
    """
    largest: dict[nn.Module, Tensor] = {}

    def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():
            seen = args[0].detach().abs().amax().float()
            largest[module] = torch.maximum(largest.get(module, seen), seen)

    hooks = [
        module.register_forward_pre_hook(observe)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    for prompt in prompts:
        model.generate(prompt.to(model.device), max_new_tokens=model.config.canvas_length)
    for hook in hooks:
        hook.remove()
    return largest


def _same_matrix(name: str) -> str:
    """Modules with the same answer become one matrix in vLLM, with one scale where it has one."""
    return re.sub(r"\b(q|k|v)_proj$", "qkv", re.sub(r"\b(gate|up)_proj$", "gate_up", name))


def _same_input(name: str) -> str:
    """Modules with the same answer read the same tensor, so their input gets one scale.

    vLLM also has one input scale for the experts' second matrices of a layer.
    """
    return _same_matrix(re.sub(r"experts\.\d+\.", "experts.*.", name))


def _largest_of_group(values: dict[str, Tensor], group_of) -> dict[str, Tensor]:
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for name, value in values.items():
        groups[group_of(name)].append(value)
    return {name: torch.stack(groups[group_of(name)]).amax() for name in values}


def set_scales(model: nn.Module, largest_inputs: dict[nn.Module, Tensor]) -> None:
    """Fill in the scales of every module that a quantization config was applied to.

    Raises:
        ValueError: If a module's input has to be calibrated and nothing reached it.
    """
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    weights = {
        name: module.weight.detach().abs().amax().float() for name, module in modules.items()
    }
    weights = _largest_of_group(weights, _same_matrix)
    inputs = {n: largest_inputs[m] for n, m in modules.items() if m in largest_inputs}
    seen = {
        _same_input(name): value for name, value in _largest_of_group(inputs, _same_input).items()
    }
    for name, module in modules.items():
        scheme = module.quantization_scheme
        _set_weight_scale(module, scheme.weights, weights[name])
        activations = scheme.input_activations
        if activations is None or activations.dynamic is True:
            continue
        largest = seen.get(_same_input(name))
        if largest is None:
            raise ValueError(f"no prompt reached {name}: give more or other --prompts")
        if activations.strategy == QuantizationStrategy.TENSOR_GROUP:
            _set(module, "input_global_scale", generate_gparam(-largest, largest))
        else:
            _set(module, "input_scale", calculate_qparams(-largest, largest, activations)[0])


def _set_weight_scale(module: nn.Module, args, largest: Tensor) -> None:
    weight = module.weight.detach().float()
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        global_scale = generate_gparam(-largest, largest)
        _set(module, "weight_global_scale", global_scale)
        _set(module, "weight_scale", _best_group_scales(weight, args, global_scale))
        return
    if args.strategy == QuantizationStrategy.TENSOR:
        low, high = -largest, largest
    else:
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    _set(module, "weight_scale", calculate_qparams(low, high, args)[0])


def _best_group_scales(weight: Tensor, args, global_scale: Tensor) -> Tensor:
    """The scale of each group with the least squared error, [out_features, in_features / 16].

    The one that just reaches the largest entry is rarely it: with eight magnitudes, cutting that
    entry off a little places the others better.
    """
    groups = weight.unflatten(-1, (-1, args.group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    best_scale, best_error = None, None
    for shrink in GROUP_SHRINKS:
        scale, zero = calculate_qparams(low * shrink, high * shrink, args, global_scale)
        rounded = fake_quantize(weight, scale, zero, args, global_scale=global_scale)
        error = (rounded - weight).square().unflatten(-1, (-1, args.group_size)).sum(-1)
        if best_scale is None:
            best_scale, best_error = scale, error
        else:
            is_better = error < best_error
            best_scale = torch.where(is_better, scale, best_scale)
            best_error = torch.where(is_better, error, best_error)
    return best_scale


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, requires_grad=False))


def state_dict_of(model: nn.Module) -> dict[str, Tensor]:
    """Tensors under the names of a checkpoint: what encoder and decoder share, as the decoder's."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(_ENCODER) and not name.endswith("layer_scalar"):
            continue
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensors[name] = tensor.contiguous()
    return tensors


def quantize(
    source: Path, output: Path, scheme: str, prompts: list[list[int]], device: str
) -> None:
    """Write the quantised checkpoint and everything else of ``source`` to ``output``."""
    preset, layout = SCHEMES[scheme]
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(source, dtype="auto").to(device).eval()
    share_modules(model)
    with torch.no_grad():
        largest = calibrate(model, (torch.tensor([prompt]) for prompt in prompts))
        config = QuantizationConfig(
            config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])},
            ignore=ignored_modules(model),
            format=layout,
        )
        apply_quantization_config(model, config)
        set_scales(model, largest)
        for module in model.modules():
            compress_module(module)
    config.quantization_status = QuantizationStatus.COMPRESSED

    output.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copy(path, output)
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = config.model_dump(mode="json", exclude_none=True) | {
        "version": compressed_tensors_version
    }
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_torch_state_dict(state_dict_of(model), output)


def read_prompts(checkpoint: Path, file: Path | None, num_prompts: int) -> list[list[int]]:
    """Token ids of chats with one user message each."""
    if file is not None:
        chats = [
            [{"role": "user", "content": line}] for line in file.read_text().splitlines() if line
        ]
    else:
        rng = random.Random(0)
        weights = dict.fromkeys(FAMILIES, 1.0)
        chats = [draw_training_example(rng, weights).messages for _ in range(num_prompts)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats[:num_prompts]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("scheme", choices=SCHEMES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=shipped_checkpoint())
    parser.add_argument("--prompts", type=Path, help="file with a user message a line")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--device", default="cpu", help="where to calibrate")
    args = parser.parse_args()
    calibrates = args.scheme in ("fp8-static", "nvfp4")
    prompts = read_prompts(args.checkpoint, args.prompts, args.num_prompts) if calibrates else []
    torch.manual_seed(0)
    quantize(args.checkpoint, args.output, args.scheme, prompts, args.device)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
