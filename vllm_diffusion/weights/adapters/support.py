"""Checks of a LoRA adapter's files before any of it is loaded.

vLLM's loader drops tensors without a module, and reports other misfits in terms of its own modules,
some only when the first request uses the adapter. Here each tensor is compared with the names and
shapes of the checkpoint's own.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, split_experts
from vllm_diffusion.weights.regular_files import file_stamp, json_object, why_not_folder
from vllm_diffusion.weights.weight_files import (
    ADAPTER,
    StoredTensor,
    file_problem,
    largest_magnitude,
    listed,
    stored_tensors,
)

CONFIG, WEIGHTS = "adapter_config.json", ADAPTER
_FLOATS = ("F32", "F16", "BF16")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight$")
_GIVE = "give the folder that PEFT's save_pretrained wrote"
_AGAIN = "copy the adapter again"
# Parts of module names, and the reason why an adapter of such a module is refused.
UNREACHED = {
    **dict.fromkeys(
        # LLaDA's head is named like an MLP's last layer.
        (
            *("embed_tokens", "word_embeddings", "lm_head", "diffusion_head"),
            *("transformer.wte", "transformer.ff_out"),
        ),
        "the vocabulary is read in tiles, from the checkpoint's own matrix; train it without "
        "embeddings and head, or merge it into the checkpoint",
    ),
    **dict.fromkeys(
        ("vision_tower", "embed_vision"),
        "images are read with the checkpoint's own weights; train it on the language model alone",
    ),
}
# Modules that vLLM fuses, which --lora-target-modules treats as one.
_TOGETHER = (
    {"qkv_proj", "q_proj", "k_proj", "v_proj"},
    {"gate_up_proj", "gate_proj", "up_proj"},
)
_Rank = Annotated[int, Meta(ge=1)]
# JSON's 1e400 is read as infinity.
_Factor = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
_Nothing = Annotated[list[Any], Meta(max_length=0)] | None
# Settings of PEFT, each with the type of its value, and with the value in words.
_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("peft_type", Literal["LORA"], '"LORA", the kind that is served'),
    ("r", _Rank, "an integer of at least 1"),
    ("lora_alpha", _Factor, "a finite number above 0"),
    ("rank_pattern", dict[str, _Rank] | _Nothing, "an object of integers of at least 1"),
    ("alpha_pattern", dict[str, _Factor] | _Nothing, "an object of finite numbers above 0"),
    ("bias", Literal["none"], '"none": biases are not adapted'),
)
# Settings of PEFT for adapters that are not only pairs of matrices. ``fan_in_fan_out`` is none of
# them: PEFT reads it for modules that no model here has, and vLLM does not.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Initialisations that leave the checkpoint's weights as they are; others change them.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class Module(NamedTuple):
    """Module that an adapter's pair of matrices belongs to.

    Attributes:
        out_features: Size of the module's output.
        in_features: Size of the module's input.
        number: Number of modules (experts) that PEFT keeps as one pair, side by side.
        parts: Published names of the modules that this one stands for, where a trainer has one
            module for what the published model has two of.
    """

    out_features: int
    in_features: int
    number: int = 1
    parts: tuple[str, ...] = ()


class _MisfitError(Exception):
    """Misfit of an adapter; the message gives the remedy."""


@dataclass(frozen=True)
class AdapterSupport:
    """Adapters that a server takes, by its checkpoint and its options.

    Attributes:
        modules: Modules by published name, as in PEFT's files.
        max_rank: Option ``--max-lora-rank``.
        target_modules: Option ``--lora-target-modules``; ``None`` for all.
        no_experts: Reason why experts are not adapted here, with the remedy; empty if they are.
        largest: Largest number of the dtype in which adapters are served.
    """

    modules: Mapping[str, Module]
    max_rank: int
    target_modules: tuple[str, ...] | None = None
    no_experts: str = ""
    largest: float = torch.finfo(torch.float32).max
    # By folder: the stamps of its files when they were read, and their problem.
    _seen: dict[Path, tuple[object, str | None]] = field(default_factory=dict, repr=False)
    # By name and folder: the stamps of the files when they were first loaded under both.
    _loaded: dict[tuple[str, Path], object] = field(default_factory=dict, repr=False)
    # By path or name: the adapter's folder.
    _fetched: dict[str, Path] = field(default_factory=dict, repr=False)

    def check_loading(self, name: str, path: str) -> None:
        """Refuse an adapter that does not fit, or whose name and folder had other files before.

        vLLM finds cached prompts of an adapter by both, and so would read the old one's keys and
        values.

        Args:
            name: Name under which it is to be served.
            path: Path as in :meth:`check`.

        Raises:
            ValueError: As :meth:`check`.
        """
        folder = self.check(path)
        now = self._seen[folder][0]
        if self._loaded.setdefault((name, folder), now) != now:
            raise ValueError(
                f"LoRA adapter {folder}: its files have changed since it was loaded as {name!r}, and cached "
                "prompts may be of the old files; load it under another name, or from another folder."
            )

    def check(self, path: str) -> Path:
        """Refuse an adapter that does not fit; one that is in a repository is fetched first.

        Files that have not changed since they were last read are not read again.

        Args:
            path: Path of its folder, or the name of a repository.

        Returns:
            Its folder on this machine.

        Raises:
            ValueError: Naming the folder, what is wrong with it and what to do.
        """
        folder = self._fetched.get(path)
        # A repository is fetched once, since its content may change; this object may have come here
        # from another machine.
        if folder is None or not os.path.exists(folder):
            folder = self._fetched[path] = local_folder(path)
        now = [file_stamp(folder / name) for name in (CONFIG, WEIGHTS)]
        then, problem = self._seen.get(folder, (None, None))
        if then != now:
            problem = None
            try:
                config, pairs = read_config(folder), read_pairs(folder)
                self._check_names(pairs)
                for name, pair in pairs.items():
                    self._check_pair(name, pair, config)
            except _MisfitError as error:
                problem = str(error)
            self._seen[folder] = (now, problem)
        if problem is not None:
            raise ValueError(f"LoRA adapter {folder}: {problem}.")
        return folder

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            for part, why in UNREACHED.items():
                if is_part(part, name):
                    raise _MisfitError(f"it adapts {name}, but {why}")
        if unknown := [name for name in names if name not in self.modules]:
            raise _MisfitError(
                f"it adapts {listed(unknown, 'modules')}, which this model has not; serve it with the model "
                "that it was trained on"
            )
        for name in names:
            if twice := sorted(set(self.modules[name].parts).intersection(names)):
                raise _MisfitError(
                    f"it adapts {name}, which is {twice[0]} too, and adapts that as well; keep one of them"
                )
        experts = {name for name in names if ".experts" in name}
        if experts and self.no_experts:
            raise _MisfitError(f"it adapts {min(experts)}, but {self.no_experts}")
        if left_out := [name for name in names if not self._is_target(name)]:
            raise _MisfitError(
                f"it adapts {listed(left_out, 'modules')}, which --lora-target-modules leaves out; name its "
                "modules there, or leave the option out"
            )
        layers = {name.partition(".experts")[0] + ".experts" for name in experts}
        of_layers = [
            name for name in self.modules if name.partition(".experts")[0] + ".experts" in layers
        ]
        if missing := [name for name in of_layers if name not in experts]:
            raise _MisfitError(
                f"it adapts experts of a layer and has nothing for {listed(missing, 'modules')}; train it on all "
                "of a layer's experts and on each of their matrices (target_parameters "
                "experts.gate_up_proj and experts.down_proj)"
            )

    def _is_target(self, name: str) -> bool:
        if self.target_modules is None:
            return True
        end = "experts" if ".experts" in name else name.rpartition(".")[2]
        ends = {end}.union(*(group for group in _TOGETHER if end in group))
        return not ends.isdisjoint(self.target_modules)

    def _check_pair(self, name: str, pair: dict[str, StoredTensor], config: Any) -> None:
        for half in "AB":
            if half not in pair:
                raise _MisfitError(f"{name} has no lora_{half}; {_AGAIN}")
        rank, scaling = config.get_rank_and_scaling(name)
        if rank > self.max_rank:
            raise _MisfitError(
                f"its rank {rank} is above --max-lora-rank {self.max_rank}; start the server with a "
                "larger one"
            )
        module = self.modules[name]
        expected = {
            "A": (rank * module.number, module.in_features),
            "B": (module.out_features, rank * module.number),
        }
        for half, shape in expected.items():
            tensor = pair[half]
            if tensor.shape != shape or tensor.dtype not in _FLOATS:
                raise _MisfitError(
                    f"{name}.lora_{half} is {tensor.dtype} {list(tensor.shape)}, but by this model "
                    f"and {CONFIG} it must be {' or '.join(_FLOATS)} {list(shape)}; serve it with "
                    "the model that it was trained on"
                )
            # vLLM multiplies the second matrix by the scaling.
            magnitude = largest_magnitude(tensor) * (scaling if half == "B" else 1)
            # The comparison is false for NaN.
            if not magnitude <= self.largest:
                raise _MisfitError(
                    f"{name}.lora_{half}, scaled by lora_alpha and r, holds numbers that are not finite in the "
                    "served dtype; train the adapter again"
                )


def is_part(part: str, name: str) -> bool:
    """Return true if a module's dotted name has this one in it, as whole words."""
    return f".{part}." in f".{name}."


def adapted_modules(tensors: CheckpointTensors, config: Any) -> dict[str, Module]:
    """Return all modules of a checkpoint that an adapter may adapt, by published name.

    Args:
        tensors: Tensors of the checkpoint.
        config: transformers' configuration of the checkpoint.
    """
    shapes = tensors.shapes(config)
    # Only a family whose trainers name modules in another way has it.
    shared_name = getattr(tensors, "shared_name", None)
    modules: dict[str, Module] = {}
    for tensor, shape in (shapes if tensors.has_fused_experts else split_experts(shapes)).items():
        parts = [part for name in tensors.all_names(tensor) if (part := _module_of(name, shape))]
        modules.update(parts)
        name = shared_name(tensor) if shared_name is not None else None
        if name is not None and (shared := _module_of(name, shape)):
            modules[shared[0]] = shared[1]._replace(parts=tuple(name for name, _ in parts))
    return {
        name: module
        for name, module in modules.items()
        if not any(is_part(part, name) for part in UNREACHED)
    }


def _module_of(tensor: str, shape: tuple[int, ...]) -> tuple[str, Module] | None:
    """Return the name and the module by which PEFT adapts a tensor; ``None`` if it does not."""
    stem, _, end = tensor.rpartition(".")
    if end == "weight" and len(shape) == 2:
        return stem, Module(*shape)
    if stem.endswith(".experts") and len(shape) == 3:
        # PEFT wraps a module once for each parameter: this one first.
        inner = ".base_layer" if end == "gate_up_proj" else ""
        return stem + inner, Module(*shape[1:], number=shape[0])
    return None


def local_folder(path: str) -> Path:
    """Return an adapter's folder on this machine; vLLM fetches it for the name of a repository.

    Raises:
        ValueError: If no repository of this name could be fetched.
    """
    folder = Path(os.path.expanduser(path))
    if os.path.exists(folder) or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is None:
        return folder
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        fetched = Path(get_adapter_absolute_path(path))
    except OSError as error:
        # Its first line; what follows is about the machine's network.
        why = f": {str(error).partition(chr(10))[0].rstrip('.')}"
    else:
        if fetched.is_absolute():
            return fetched
        why = ", for the reason that is in the log"
    raise ValueError(
        f"LoRA adapter {path}: there is no such folder, and no repository of this name could be fetched{why}; "
        f"{_GIVE}, or the name of a repository that holds one."
    )


def read_config(folder: Path) -> Any:
    """Check an adapter's configuration and read it with vLLM."""
    from vllm.lora.peft_helper import PEFTHelper

    if not os.path.exists(folder):
        raise _MisfitError(f"there is no such folder; {_GIVE}")
    if problem := why_not_folder(folder):
        raise _MisfitError(f"it {problem}; {_GIVE}")
    path = folder / CONFIG
    if not path.is_file():
        raise _MisfitError(f"it has no {CONFIG}; {_GIVE}")
    try:
        config = {"bias": "none", **json_object(path)}
    except ValueError as error:
        raise _MisfitError(f"{CONFIG} {error}; {_AGAIN}") from None

    for key, kind, what in _KINDS:
        try:
            msgspec.convert(config.get(key), kind)
        except msgspec.ValidationError:
            raise _MisfitError(f"{CONFIG}: {key}={config.get(key)!r} must be {what}") from None
    for key in _UNSUPPORTED:
        if config.get(key):
            raise _MisfitError(
                f"{CONFIG}: {key}={config[key]!r} must be left out, false or empty: it is not served"
            )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise _MisfitError(
            f"{CONFIG}: init_lora_weights={start!r} must be one that leaves the model's own weights as they "
            "are; convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    return PEFTHelper.from_dict({"target_modules": [], **config})


def read_pairs(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Read the adapter's tensors ``"A"`` and ``"B"`` of each module."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise _MisfitError(f"it has no {WEIGHTS}; {_GIVE}")
    if problem := file_problem(path):
        raise _MisfitError(f"{WEIGHTS} {problem}; {_AGAIN}")
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for tensor in stored_tensors([path]):
        if not tensor.name.isprintable():
            raise _MisfitError(f"{WEIGHTS} holds a tensor named {tensor.name!r}; {_AGAIN}")
        match = _TENSOR.match(tensor.name)
        if match is None:
            raise _MisfitError(
                f"{WEIGHTS} holds {tensor.name}, which is not a matrix of a LoRA adapter; train it "
                "without modules_to_save, embeddings, biases and DoRA"
            )
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise _MisfitError(f"{WEIGHTS} holds no tensors; {_AGAIN}")
    return pairs
