"""Check that a checkpoint's tensors are those that its config describes, and that this machine can hold and run them.

vLLM's loader reports some misfits while it loads, in terms of its own modules, and for quantised
checkpoints it does not notice missing tensors. Here every tensor has a rule: a name, a shape and
the dtypes that it may have, from ``transformers``' model and the format. That a GPU is too small vLLM
finds out in the engine's process, and ends with a stack trace.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.weights.formats import (
    FLOATS,
    GROUP_SIZE,
    Format,
    Spec,
    ignored_entries,
    matches,
    read_format,
)
from vllm_diffusion.weights.tensor_rules import (
    Shape,
    TensorRules,
    has_split_experts,
    split_experts,
)
from vllm_diffusion.weights.weight_files import StoredTensor, stored_tensors, weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Scales of the KV cache are optional; without them vLLM uses 1.
_OPTIONAL_ENDS = ("k_scale", "v_scale", "q_scale", "kv_scale", "inv_freq")
# Row-parallel modules: tensor parallelism cuts their rows' groups.
_CUT_ACROSS_INPUT = ("o_proj", "down_proj", "attention.dense")
_NAMED = 3


def check_checkpoint(
    model: str, config: Any, rules: TensorRules, quantization: dict[str, Any] | None, tp: int
) -> dict[str, Spec] | None:
    """Compare a local checkpoint's tensors with its config; do nothing if it is not local.

    Args:
        model: Folder of the checkpoint.
        config: transformers' configuration of the checkpoint.
        rules: Names and shapes of its tensors.
        quantization: Its quantization config, or ``None``.
        tp: Ranks of tensor parallelism.

    Returns:
        The tensors that it must hold; ``None`` where nothing was compared.

    Raises:
        ValueError: Naming the tensor, its file and what is wrong, in a sentence.
    """
    directory = Path(model)
    files = weight_files(directory) if directory.is_dir() else []
    if not files:
        return None
    shapes = rules.shapes(config)
    stored: dict[str, StoredTensor] = {}
    for tensor in stored_tensors(files):
        name = rules.canonical_name(tensor.name)
        if name in stored:
            other = stored[name]
            raise ValueError(
                f"{tensor.name} in {tensor.file} and {other.name} in {other.file} are the same "
                "tensor of the model; keep one of them."
            )
        stored[name] = tensor
    if has_split_experts(stored):
        shapes = split_experts(shapes)
    quantized = None
    if quantization is not None:
        quantized = read_format(quantization)
        _check_ignored(quantization, shapes, rules)
        if quantized is None:
            return None
        _check_groups(quantized, shapes, rules, tp)
    specs = expected_specs(shapes, quantized, rules)
    _check_tensors(stored, specs, rules, files[0])
    return specs


def expected_specs(
    shapes: dict[str, Shape], quantized: Format | None, rules: TensorRules
) -> dict[str, Spec]:
    """Return the allowed dtypes and shapes of every tensor of the checkpoint, by canonical name."""
    specs: dict[str, Spec] = {name: (FLOATS, (shape,)) for name, shape in shapes.items()}
    if quantized is None:
        return specs
    for name, shape in rules.linear_modules(shapes).items():
        if quantized.quantizes(rules.all_names(name)):
            del specs[f"{name}.weight"]
            specs |= {f"{name}.{end}": spec for end, spec in quantized.tensors(shape).items()}
    return specs


def check_new_weights(config: Any, rules: TensorRules, quantization: dict[str, Any] | None) -> None:
    """Refuse a checkpoint whose weights vLLM cannot load a second time.

    Its loader of experts' activation scales reads the present scale, and there is none while a
    layer is loaded again.

    Args:
        config: transformers' configuration of the checkpoint.
        rules: Names and shapes of its tensors.
        quantization: Its quantization config, or ``None``.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    if quantization is None or quantization.get("quant_method") != "compressed-tensors":
        return
    specs = expected_specs(split_experts(rules.shapes(config)), read_format(quantization), rules)
    if any(".experts." in name and name.endswith(".input_scale") for name in specs):
        raise ValueError(
            "--weight-transfer-config: vLLM cannot load the activation scales of experts into a running "
            "server (compressed-tensors FP8 with static activations); serve a checkpoint with dynamic "
            "activation scales, or leave it out."
        )


def _check_tensors(
    stored: dict[str, StoredTensor], specs: dict[str, Spec], rules: TensorRules, file: Path
) -> None:
    missing = [name for name in specs if name not in stored and rules.copy_of(name) not in stored]
    if missing:
        raise ValueError(
            f"{listed(missing)} should be in {file.parent}, by its config.json, but "
            f"{'is' if len(missing) == 1 else 'are'} not; copy or download the checkpoint again, "
            "or correct quantization_config."
        )
    unexpected = [
        tensor
        for name, tensor in stored.items()
        if name not in specs and not name.endswith(_OPTIONAL_ENDS) and name != "lm_head.weight"
    ]
    if unexpected:
        raise ValueError(
            f"{listed([tensor.name for tensor in unexpected])} in {unexpected[0].file} "
            "belongs to no module that config.json describes; correct quantization_config (its "
            "ignore list says which modules are not quantised)."
        )
    for name, spec in specs.items():
        if name in stored and (
            misfit := why_misfit(stored[name], spec, "by config.json it must be")
        ):
            raise ValueError(f"{misfit}; quantise or download the checkpoint again.")


def why_misfit(tensor: StoredTensor, spec: Spec, expected: str) -> str | None:
    """Return that a tensor has another dtype or shape than it must have; ``None`` if it has not.

    Args:
        tensor: The tensor.
        spec: Allowed dtypes and shapes.
        expected: Words between what it is and what it must be.
    """
    dtypes, shapes = spec
    if tensor.dtype in dtypes and tensor.shape in shapes:
        return None
    return (
        f"{tensor.name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}, but {expected} "
        f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
    )


def listed(names: list[str], noun: str = "tensors") -> str:
    """List the first names, and the number of the others."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more {noun}" if rest > 0 else "")


def _check_ignored(settings: dict[str, Any], shapes: dict[str, Shape], rules: TensorRules) -> None:
    method = str(settings.get("quant_method", ""))
    names = rules.module_names(shapes) | rules.module_names(split_experts(shapes))
    unmatched = [
        entry
        for entry in ignored_entries(settings)
        if not any(matches(method, entry, (name,)) for name in names)
    ]
    if unmatched:
        raise ValueError(
            f"{listed(unmatched)} in the ignore list of quantization_config in config.json "
            "matches no module of the model; correct the name, or take it out."
        )


def _check_groups(quantized: Format, shapes: dict[str, Shape], rules: TensorRules, tp: int) -> None:
    if not quantized.is_fp4:
        return
    for name, (_, in_size) in rules.linear_modules(shapes).items():
        if not quantized.quantizes(rules.all_names(name)):
            continue
        ranks = tp if name.endswith(_CUT_ACROSS_INPUT) and ".layers." in name else 1
        if "vision_tower" in name or "self_conditioning" in name:
            ranks = 1
        if in_size % (GROUP_SIZE * ranks) != 0:
            on_ranks = f" over {ranks} ranks" if ranks > 1 else ""
            is_cut = in_size % GROUP_SIZE == 0
            remedy = "lower --tensor-parallel-size" if is_cut else "leave the module unquantised"
            raise ValueError(
                f"{name} reads {in_size} numbers{on_ranks}, which NVFP4's groups of {GROUP_SIZE} "
                f"do not divide; {remedy}."
            )


def check_platform(model: str, quantization: dict[str, Any] | None) -> None:
    """Refuse FP4 on a machine that can neither run nor emulate it.

    Raises:
        ValueError: Naming the checkpoint, the platform and what can be served instead.
    """
    quantized = None if quantization is None else read_format(quantization)
    if quantized is None or not quantized.is_fp4:
        return
    from vllm.platforms import current_platform

    # Every NVIDIA GPU that this torch runs on (7.5 and above) has a kernel of vLLM's for it.
    is_ours = type(current_platform).__name__ == "DiffusionCpuPlatform"
    if current_platform.is_cuda() or current_platform.is_rocm() or is_ours:
        return
    platform = current_platform.device_name or "this platform"
    raise ValueError(
        f"The weights of {model} are NVFP4 ({quantized.name}), which this machine can neither run "
        f"nor emulate: vLLM has no kernel for it on {platform}. Serve the FP8 or BF16 checkpoint "
        "here, or use the ordinary vLLM wheel without an accelerator, where FP4 is emulated."
    )


# Tensor cores for bfloat16, which every kernel here is compiled for.
OLDEST = (8, 0)


def check_capability() -> None:
    """Refuse an NVIDIA GPU of a compute capability below 8.0.

    Raises:
        ValueError: Naming the GPU, its compute capability and what serves instead.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is not None and capability < OLDEST:
        raise ValueError(
            f"This GPU ({current_platform.get_device_name()}) has compute capability "
            f"{capability.as_version_str()}, and diffusion models need 8.0 or above: serve on an A100, "
            "an RTX 30 or newer, or set VLLM_DIFFUSION_CPU=1 to serve on the CPU."
        )


def check_room(
    vllm_config: VllmConfig, rules: TensorRules, specs: dict[str, Spec] | None = None
) -> None:
    """Refuse weights that are larger than the memory which vLLM may take of an NVIDIA GPU.

    Args:
        vllm_config: Configuration of the server.
        rules: Names and shapes of a checkpoint's tensors.
        specs: Tensors that the checkpoint was found to hold, if it was read.

    Raises:
        ValueError: Naming both sizes in GiB and the remedies.
    """
    from vllm.platforms import current_platform

    offload = vllm_config.offload_config
    if (
        not current_platform.is_cuda()
        or offload.uva.cpu_offload_gb
        or offload.prefetch.offload_group_size
    ):
        return
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if specs is None:
        quantization = model_config.model_arch_config.quantization_config
        specs = described_specs(model_config.hf_config, rules, quantization)
    needed = weight_bytes(specs, model_config.dtype.itemsize)
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.enable_expert_parallel:
        ranks *= parallel.data_parallel_size
    cache_config = vllm_config.cache_config
    memory = current_platform.get_device_total_memory()
    # With a cache of a given size, vLLM counts no share.
    share = 1.0 if cache_config.kv_cache_memory_bytes else cache_config.gpu_memory_utilization
    if needed / ranks > memory * share:
        raise ValueError(
            f"The weights take {needed / ranks / 2**30:.1f} GiB of each GPU, and this one "
            f"({current_platform.get_device_name()}) has {memory / 2**30:.1f} GiB, of which vLLM may take "
            f"{memory * share / 2**30:.1f} (--gpu-memory-utilization): serve a checkpoint in a smaller format "
            "(docs/operate/small-gpus.md), on a larger GPU, or on several with --tensor-parallel-size."
        )


def described_specs(
    config: Any, rules: TensorRules, quantization: dict[str, Any] | None
) -> dict[str, Spec]:
    """Return the tensors of a checkpoint by its configuration; none of a format that is not known here.

    Args:
        config: transformers' configuration of the checkpoint.
        rules: Names and shapes of its tensors.
        quantization: Its quantization config, or ``None``.
    """
    shapes = rules.shapes(config)
    if quantization is None:
        return expected_specs(shapes, None, rules)
    quantized = read_format(quantization)
    return {} if quantized is None else expected_specs(split_experts(shapes), quantized, rules)


def weight_bytes(specs: dict[str, Spec], itemsize: int) -> int:
    """Return the bytes that all ranks hold of a checkpoint's weights, at least.

    A vision tower is left out, since a server may do without, and so are scales beyond a weight's
    format.

    Args:
        specs: The checkpoint's tensors.
        itemsize: Bytes of an element that is not quantised.
    """
    return sum(
        math.prod(allowed[0]) * (itemsize if dtypes == FLOATS else 1)
        for name, (dtypes, allowed) in specs.items()
        if "vision" not in name
    )
