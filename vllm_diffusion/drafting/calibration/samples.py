"""Training samples of a draft: token ids, and the target's hidden states at each of them."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vllm_diffusion.weights.regular_files import why_not_folder

_HELD_OUT = "held-out"


@dataclass(frozen=True)
class Sample:
    """One sequence as the target read it.

    Attributes:
        token_ids: Token ids of the sequence, [T], int64.
        hidden_states: Outputs of the layers that the draft reads, [T, num_layers, hidden], any
            float dtype.
        answer_start: Position of the first token that the target wrote: nothing before it is
            learnt.
    """

    token_ids: Tensor
    hidden_states: Tensor
    answer_start: int = 0


def read_sample(path: Path, num_layers: int, hidden_size: int) -> Sample:
    """Read a file of vLLM's hidden-state extraction.

    The file holds ``token_ids`` and ``hidden_states`` as in :class:`Sample`; ``answer_start``, one
    int64, is optional.

    Args:
        path: Path of the file.
        num_layers: Number of layers that the draft reads.
        hidden_size: Hidden size of the target.

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
        raise ValueError(f"{path} is not a file of safetensors: {error}") from None
    if ids.dim() != 1 or states.shape != (len(ids), num_layers, hidden_size):
        raise ValueError(
            f"{path} has hidden_states of {list(states.shape)} for {list(ids.shape)} token_ids; the "
            f"draft reads [tokens, {num_layers}, {hidden_size}]: extract its target_layer_ids."
        )
    start = tensors.get("answer_start")
    return Sample(ids.long(), states, 0 if start is None else int(start))


def sample_name(idx: int, is_held_out: bool) -> str:
    """Return a sample's file name; it begins with ``held-out`` if drafts are only measured on
    it.
    """
    return f"{_HELD_OUT if is_held_out else 'sample'}-{idx:07d}.safetensors"


def is_held_out(path: Path) -> bool:
    """Return true if drafts are measured on a file and not trained on it."""
    return path.name.startswith(_HELD_OUT)


def sample_files(folder: Path) -> list[Path]:
    """Return the files of a folder of extracted hidden states, in the order of their names.

    Raises:
        ValueError: If there is none, or the folder holds anything but files.
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
    """Yield samples without end: all files in random order, then all again in another order.

    One sample is in memory at a time.
    """
    rng = random.Random(seed)
    while True:
        for path in rng.sample(files, len(files)):
            yield read_sample(path, num_layers, hidden_size)
