"""What a draft is trained on: token ids, and the target's hidden states at each of them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vllm_diffusion.weights.regular_files import why_not_folder

_DESCRIPTION = "extraction.json"
_HELD_OUT = "held-out"


@dataclass(frozen=True)
class Sample:
    """One sequence as the target read it.

    Attributes:
        token_ids: [T], int64.
        hidden_states: Outputs of the layers that the draft reads, [T, num_layers, hidden], any float
            dtype.
        answer_start: Position of the first token that the target wrote: nothing before it is learnt.
    """

    token_ids: Tensor
    hidden_states: Tensor
    answer_start: int = 0


def read_sample(path: Path, num_layers: int, hidden_size: int) -> Sample:
    """A file of vLLM's hidden-state extraction.

    It holds ``token_ids`` and ``hidden_states``, as :class:`Sample` has them; ``answer_start``, one
    int64, may stand beside them.

    Args:
        path: Of the file.
        num_layers: That the draft reads.
        hidden_size: Of the target.

    Raises:
        ValueError: Naming the file and what is wrong with it.
    """
    try:
        tensors = load_file(path)
        ids, states = tensors["token_ids"], tensors["hidden_states"]
    except KeyError as error:
        raise ValueError(
            f"{path} has no tensor {error}; extract the hidden states again."
        ) from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is no file of safetensors: {error}") from None
    if ids.dim() != 1 or states.shape != (len(ids), num_layers, hidden_size):
        raise ValueError(
            f"{path} has hidden_states of {list(states.shape)} for {list(ids.shape)} token_ids; the "
            f"draft reads [tokens, {num_layers}, {hidden_size}]: extract its target_layer_ids."
        )
    start = tensors.get("answer_start")
    return Sample(ids.long(), states, 0 if start is None else int(start))


@dataclass(frozen=True)
class Extraction:
    """What a folder of samples was extracted from, ``extraction.json`` in it.

    Attributes:
        target: The model, as vLLM was given it.
        target_layer_ids: Layers whose outputs the samples hold.
        num_target_layers: Of the target.
        hidden_size: Of the target.
        vocab_size: Of the target.
    """

    target: str
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    vocab_size: int


def write_extraction(folder: Path, extraction: Extraction) -> None:
    """Say what the samples of a folder are."""
    content = json.dumps(asdict(extraction), indent=2) + "\n"
    (folder / _DESCRIPTION).write_text(content, encoding="utf-8")


def read_extraction(folder: Path) -> Extraction:
    """What the samples of a folder are.

    Raises:
        ValueError: If nothing says so.
    """
    path = folder / _DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        layers = tuple(content.pop("target_layer_ids"))
        return Extraction(target_layer_ids=layers, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} does not say what was extracted ({error}); extract hidden states there with "
            "vllm-diffusion calibrate extract."
        ) from None


def sample_name(idx: int, is_held_out: bool) -> str:
    """The name of a file: samples that drafts are only measured on begin with ``held-out``."""
    return f"{_HELD_OUT if is_held_out else 'sample'}-{idx:07d}.safetensors"


def is_held_out(path: Path) -> bool:
    """Whether drafts are measured on a file, and not trained on it."""
    return path.name.startswith(_HELD_OUT)


def sample_files(folder: Path) -> list[Path]:
    """The files of a folder of extracted hidden states, in the order of their names.

    Raises:
        ValueError: If there is none, or another thing among them than files.
    """
    if os.path.exists(folder) and (problem := why_not_folder(folder)):
        raise ValueError(f"{folder} {problem}; extract hidden states to a folder of their own.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file; extract hidden states there first.")
    return files


def shuffled_samples(
    files: Sequence[Path], num_layers: int, hidden_size: int, seed: int
) -> Iterator[Sample]:
    """Endless: all files in random order, then all again in another. One is in memory at a time."""
    rng = random.Random(seed)
    while True:
        for path in rng.sample(files, len(files)):
            yield read_sample(path, num_layers, hidden_size)
