"""Reader of safetensors files, and checks for damaged or missing ones before anything is loaded."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_diffusion.weights.regular_files import json_object, why_not_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")

INDEX = "model.safetensors.index.json"
# Mistral's own releases have their weights a second time, under other names.
CONSOLIDATED = "consolidated*.safetensors"
ADAPTER = "adapter_model.safetensors"
# Ends of names of pickled weights, and beginnings of what trainers write next to them.
PICKLED = (".bin", ".pt", ".pth")
_OF_TRAINERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "adapter_model")
# Bytes that are read at once.
_CHUNK_BYTES = 2**24
# A file starts with the length of its header.
_LENGTH_BYTES = 8
# Names that a message lists.
_NAMED = 3
_ADVICE = "copy or download the checkpoint again."
# By safetensors' name.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


def listed(names: list[str], noun: str = "tensors") -> str:
    """List the first names, and the number of the others."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more {noun}" if rest > 0 else "")


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as a file's header describes it; ``dtype`` is safetensors' name.

    Attributes:
        begin: Offset of its first byte in the file.
        end: Offset after its last byte in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(files: Iterable[Path]) -> list[StoredTensor]:
    """List the tensors of these files, from headers that :func:`file_problem` accepted."""
    tensors = []
    for path in files:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_bytes))
        data = _LENGTH_BYTES + header_bytes
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (data + offset for offset in entry["data_offsets"])
                shape = tuple(entry["shape"])
                tensors.append(StoredTensor(name, path, entry["dtype"], shape, begin, end))
    return tensors


def read_tensor(tensor: StoredTensor) -> Tensor:
    """Read a tensor into memory of its own: a mapped file that is cut short would end the process.

    Raises:
        ValueError: If the file has become shorter than its header states.
    """
    data = bytearray(tensor.end - tensor.begin)
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        if file.readinto(data) != len(data):
            raise ValueError(f"{tensor.file} was cut short while it was read.")
    dtype = _DTYPES[tensor.dtype]
    if not data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


def largest_magnitude(tensor: StoredTensor) -> float:
    """Return the largest magnitude among a tensor's values; NaN or infinity if one of them is.

    Values of a kind that has neither (packed FP4), or that no family has, are not read, and give 0.

    Raises:
        ValueError: If the file has become shorter than its header states.
    """
    dtype = _DTYPES.get(tensor.dtype)
    size = tensor.end - tensor.begin
    if not size or dtype is None or not dtype.is_floating_point:
        return 0.0
    largest = torch.zeros((), dtype=torch.float64)
    buffer = bytearray(min(size, _CHUNK_BYTES))
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        for begin in range(0, size, len(buffer)):
            chunk = memoryview(buffer)[: size - begin]
            if file.readinto(chunk) != len(chunk):
                raise ValueError(f"{tensor.file} was cut short while it was read.")
            # Both propagate NaN.
            largest = torch.maximum(largest, largest_of(torch.frombuffer(chunk, dtype=dtype)))
    return float(largest)


def largest_of(values: Tensor) -> Tensor:
    """Return the largest magnitude, float64, without a copy of the values; NaN if one of them is.

    Args:
        values: At least one floating-point number, on any device.
    """
    if values.dtype != torch.float8_e4m3fn:
        if values.element_size() < 2:
            values = values.float()
        least, most = torch.aminmax(values)
        return torch.maximum(-least.double(), most.double())
    # Read as integers its bits are ordered as magnitudes are, with the sign bit before them: the
    # largest signed byte is a positive value's if there is any, the largest unsigned one a negative
    # value's.
    bits = values.view(torch.uint8)
    positive, negative = bits.view(torch.int8).max().clamp(min=0), bits.max()
    magnitudes = torch.stack(
        [positive.to(torch.uint8), negative & 127 if negative > 127 else negative * 0]
    )
    return magnitudes.max().view(torch.float8_e4m3fn).double()


def weight_files(model: Path) -> list[Path]:
    """List the files of a checkpoint's weights: those that vLLM's loader reads.

    An index names all of them. Without one they are all safetensors files but an adapter's, or the
    consolidated ones alone where there are any: vLLM prefers them.

    Args:
        model: Folder of the checkpoint. Files that an index names may be missing from it.

    Raises:
        ValueError: If there is an index that names no files.
    """
    index = model / INDEX
    if index.is_file():
        try:
            names = set(json_object(index)["weight_map"].values())
            return [model / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} holds no weight_map of files; {_ADVICE}") from None
    files = sorted(path for path in model.glob("*.safetensors") if path.name != ADAPTER)
    return [path for path in files if path.match(CONSOLIDATED)] or files


def is_of_adapter(name: str) -> bool:
    """Return true if a tensor is of an adapter that PEFT saved, and of no model's own weights."""
    return name.startswith("base_model.model.")


def check_weight_files(model: str) -> None:
    """Check that each file of the weights is there, by its header; do nothing if the checkpoint is
    not local.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to do.
    """
    directory = Path(model)
    if not directory.is_dir():
        return
    files = weight_files(directory)
    for path in files:
        if not path.is_file():
            raise ValueError(
                f"{directory / INDEX} names {path.name}, which does not exist; {_ADVICE}"
            )
        if problem := file_problem(path):
            raise ValueError(f"{path} {problem}; {_ADVICE}")
    pickled = _pickled_files(directory)
    if not files and pickled:
        raise ValueError(
            f"{directory} holds pickled weights only ({pickled[0].name}), which are not loaded: "
            "unpickling may run code from the file. Convert them with: "
            f"{conversion_command(directory, pickled)}"
        )


def choose_weight_files(vllm_config: VllmConfig) -> None:
    """Load the files that an index names, and warn of an adapter that is not loaded.

    vLLM would load consolidated files before them, which Mistral's releases have under other names
    of tensors.
    """
    load_config, folder = vllm_config.load_config, Path(vllm_config.model_config.model)
    if load_config.load_format == "auto" and (folder / INDEX).is_file():
        load_config.load_format = "hf"
    if (folder / ADAPTER).is_file() and vllm_config.lora_config is None:
        module = shlex.quote(f"NAME={folder}")
        logger.warning(
            "%s is an adapter, and the model is served without it; with --enable-lora --lora-modules %s "
            "requests for the model NAME are answered with it.",
            folder / ADAPTER,
            module,
        )


def _pickled_files(directory: Path) -> list[Path]:
    """List the pickled files of a checkpoint that may be weights; a trainer's own files are
    none.
    """
    files = sorted(path for end in PICKLED for path in directory.glob(f"*{end}"))
    weights = [path for path in files if not path.name.startswith(_OF_TRAINERS)]
    return [path for path in weights if path.name.startswith("pytorch_model")] or weights


def conversion_command(directory: Path, files: list[Path]) -> str:
    """Return a command that writes a safetensors file for each of these pickled ones, in the same
    folder.

    It loads nothing but tensors, and stores those that share memory separately.
    """
    name = files[0].name
    pattern = f"pytorch_model*{files[0].suffix}" if name.startswith("pytorch_model") else name
    if len(files) > 1 and pattern == name:
        pattern = f"*{files[0].suffix}"
    code = (
        "import sys, pathlib, torch; from safetensors.torch import save_file; "
        "[save_file({name: tensor.contiguous().clone() for name, tensor in "
        'torch.load(path, map_location="cpu", weights_only=True).items()}, '
        'path.with_suffix(".safetensors"), {"format": "pt"}) '
        "for path in pathlib.Path(sys.argv[1]).glob(sys.argv[2])]"
    )
    return " ".join(["python -c", *map(shlex.quote, (code, str(directory), pattern))])


def file_problem(path: Path) -> str | None:
    """Return why the file cannot be read as safetensors; ``None`` if its header and size agree."""
    if problem := why_not_file(path):
        return problem
    try:
        with safe_open(path, framework="np"):
            return None
    except (SafetensorError, OSError) as error:
        return f"is truncated or not a safetensors file ({error})"


def checkpoint_file(model_config: ModelConfig, folder: str, name: str) -> Path | None:
    """Return the path of a file in a subfolder of the checkpoint, fetched if it is on the hub.

    Returns:
        ``None`` if the checkpoint has no such file.
    """
    from transformers.utils import cached_file

    cached = cached_file(
        model_config.model,
        name,
        subfolder=folder,
        revision=model_config.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached is None else Path(cached)
