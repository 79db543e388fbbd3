"""Checks of a draft on disk that is to replace the draft of a running server.

The server's CUDA graphs and memory for its draft stay: so the new one must have the same
architecture and sizes, and fit the target as a draft must at start-up. Nothing of the server
changes here.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_diffusion.drafting.draft_check import (
    ARCHITECTURE,
    STOCK_ARCHITECTURE,
    check_pair,
    set_window,
)
from vllm_diffusion.drafting.draft_fields import (
    block_size_of,
    dflash_fields,
    mask_token_of,
    name_as_vllm,
    restore_causality,
)
from vllm_diffusion.drafting.draft_settings import draft_settings
from vllm_diffusion.drafting.reference_draft import ReferenceDraft, reach_of_layer
from vllm_diffusion.drafting.swap import UNHARMED
from vllm_diffusion.weights.formats import FLOATS
from vllm_diffusion.weights.regular_files import file_stamp, why_not_file, why_not_folder
from vllm_diffusion.weights.weight_files import (
    StoredTensor,
    file_problem,
    largest_magnitude,
    read_tensor,
    stored_tensors,
    weight_files,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RESTART = "restart the server with it"
# Fields that vLLM's layers are built from.
_OF_MODEL = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias"),
    *("vocab_size", "target_hidden_size", "is_neox_style", "logit_scale"),
)
_OF_DFLASH = (
    *("mask_token_id", "target_layer_ids", "attention_sink_bias", "attention_value_scale"),
    "use_aux_hidden_state",
)
# vLLM's default, which differs from that of transformers.
_DEFAULT_THETA = 1000000


def check_replaceable(vllm_config: VllmConfig) -> None:
    """Refuse a server whose draft cannot be replaced while it runs.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if spec is None:
        raise ValueError(
            "The server has no draft to replace; start it with one (--speculative-config)."
        )
    if spec.method != "dflash":
        raise ValueError(
            f"--speculative-config: a draft of method {spec.method!r} cannot be replaced while the "
            'server runs, only one of "dflash"; restart the server with the new one.'
        )
    (architecture,) = spec.draft_model_config.architectures
    if architecture not in (ARCHITECTURE, STOCK_ARCHITECTURE):
        raise ValueError(
            f"--speculative-config: a draft of architecture {architecture} cannot be replaced while the "
            f"server runs, only {STOCK_ARCHITECTURE} and {ARCHITECTURE}; restart the server with the "
            "new one."
        )
    if spec.draft_model_config.quantization is not None:
        raise ValueError(
            "--speculative-config: the draft is quantised, and its layers rewrite what they load; "
            "restart the server with the new one."
        )
    for option, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"{option} {size}: a draft is replaced on a server of one stage and one engine; "
                "restart the server with the new one."
            )


def read_new_draft(folder: Path, vllm_config: VllmConfig) -> dict[str, Tensor]:
    """Read the tensors of a draft that may replace the served one, in host memory.

    Args:
        folder: Draft in z-lab's layout: ``config.json`` and safetensors files.
        vllm_config: Configuration of the server.

    Raises:
        ValueError: Naming the file, the field or the tensor, and the remedy.
    """
    stamps = _stamps(folder)
    tensors = {one.name: read_tensor(one) for one in check_new_draft(folder, vllm_config)}
    # A file that was rewritten while it was read may mix two drafts.
    if _stamps(folder) != stamps:
        raise ValueError(
            f"{folder} was changed while it was read; leave a draft's files as they are, and send it again. "
            f"{UNHARMED.capitalize()}."
        )
    return tensors


def _stamps(folder: Path) -> dict[Path, Any]:
    files = folder.glob("*.safetensors") if os.path.isdir(folder) else ()
    return {file: file_stamp(file) for file in files}


def check_new_draft(folder: Path, vllm_config: VllmConfig) -> list[StoredTensor]:
    """Check a draft as :func:`read_new_draft` does, without keeping its tensors.

    Returns:
        The tensors to load.

    Raises:
        ValueError: As in :func:`read_new_draft`.
    """
    check_replaceable(vllm_config)
    config = _read_config(folder)
    name_as_vllm(config)
    restore_causality(config)
    spec = vllm_config.speculative_config
    where = f"config.json of the draft {folder}"
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{folder / 'mask_embedding.pt'}: a mask embedding of its own is not replaced while the "
            f"server runs; {_RESTART}."
        )
    settings = draft_settings(vllm_config)
    check_pair(config, folder, spec, window=settings.window)
    served = spec.draft_model_config
    (served_as,) = served.architectures
    # Our class serves both.
    known = {served_as, STOCK_ARCHITECTURE} if served_as == ARCHITECTURE else {served_as}
    if config.architectures is None or not set(config.architectures) & known:
        raise ValueError(
            f"{where}: architectures={config.architectures!r}, but the server runs {served_as}; "
            f"{_RESTART}, or set architectures to it if that is what was trained."
        )
    if settings.window is not None:
        set_window(config, settings.window)
    _check_same(config, served.hf_config, where)
    try:
        with torch.device("meta"):
            expected = ReferenceDraft(config).state_dict()
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: the layout is not known here ({error}); {_RESTART}.") from None
    return _checked_tensors(folder, {name: tuple(one.shape) for name, one in expected.items()})


def _checked_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> list[StoredTensor]:
    """List the tensors of a draft in z-lab's layout, which has no embedding and no head.

    Args:
        folder: Draft.
        shapes: Shapes by name.

    Raises:
        ValueError: If a tensor is unknown, missing, of another shape or kind of number, or not
            finite.
    """
    files = weight_files(folder)
    problems = [f"{file} {problem}" for file in files if (problem := file_problem(file))]
    stored = [] if problems else stored_tensors(files)
    for one in stored:
        shape = shapes.get(one.name)
        if shape is None:
            problems.append(f"{one.name} in {one.file} is not a tensor of the served draft")
        elif one.shape != shape or one.dtype not in FLOATS:
            problems.append(
                f"{one.name} in {one.file} is {one.dtype} {list(one.shape)}, but in the served draft it is "
                f"{' or '.join(FLOATS)} {list(shape)}"
            )
        elif not math.isfinite(largest_magnitude(one)):
            problems.append(f"{one.name} in {one.file} holds numbers that are not finite")
    if not files:
        problems.append(f"{folder} holds no safetensors file")
    missing = shapes.keys() - {one.name for one in stored}
    if not problems and missing:
        problems.append(f"{min(missing)} is not in {folder}, and {len(missing) - 1} more tensors")
    if problems:
        raise ValueError(f"{problems[0]}; copy or train the draft again. {UNHARMED.capitalize()}.")
    return stored


def _read_config(folder: Path) -> Any:
    from vllm.transformers_utils.config import get_config

    path = folder / "config.json"
    problem = why_not_folder(folder)
    if problem is None and why_not_file(path):
        problem = "has no config.json"
    if not folder.is_absolute():
        problem = "is not absolute"
    if problem is not None:
        raise ValueError(
            f"model={str(folder)!r} {problem}; it must be the absolute path of a draft's folder that the "
            f"server can read, with config.json. {UNHARMED.capitalize()}."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is not an object")
        if content.get("quantization_config"):
            raise TypeError(
                "quantization_config: a quantised draft is not taken while a server runs"
            )
        config = get_config(str(folder), trust_remote_code=False)
        # vLLM leaves out the block of a draft that `speculators` saved.
        config.block_size = block_size_of(config) or content.get("block_size")
        return config
    # transformers raises many kinds of errors for fields with bad values.
    except Exception as error:
        raise ValueError(
            f"{path} is not a configuration of a draft ({error}); copy or train the draft again. "
            f"{UNHARMED.capitalize()}."
        ) from None


def _check_same(new: Any, served: Any, where: str) -> None:
    """Refuse a draft of other sizes: names, shapes and graphs of the served draft stay."""
    expected = _make(served)
    for name, value in _make(new).items():
        if value != expected[name]:
            raise ValueError(
                f"{where}: {name}={value!r}, but the served draft has {expected[name]!r}; train a draft "
                f"of the same make, or {_RESTART}. {UNHARMED.capitalize()}."
            )


def _make(config: Any) -> dict[str, Any]:
    options = dflash_fields(config)
    make = {name: getattr(config, name, None) for name in _OF_MODEL}
    make |= {f"dflash_config.{name}": options.get(name) for name in _OF_DFLASH}
    make["dflash_config.mask_token_id"] = mask_token_of(config)
    rotation = dict(getattr(config, "rope_parameters", None) or {})
    make["rope_parameters"] = {"rope_theta": _DEFAULT_THETA} | rotation
    layers = range(config.num_hidden_layers)
    make["layer_types and windows"] = [reach_of_layer(config, layer) for layer in layers]
    return make
