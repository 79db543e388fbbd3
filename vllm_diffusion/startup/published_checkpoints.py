"""Published checkpoints that are served: ``families/checkpoints.toml``, read for a command and a
page.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

# GB that a GPU has, of those that are common.
_CARDS = (8, 12, 16, 24, 32, 48, 80, 96, 141)
# GB of each of several GPUs that share a checkpoint.
_SHARED = 80
# GB beside the weights: activations, graphs, and a cache for some requests.
_BESIDE_WEIGHTS = 4


@dataclass(frozen=True)
class Checkpoint:
    """One published checkpoint.

    Attributes:
        id: Owner and name on the hub.
        source: Where the id was read, a key of ``SOURCES`` in ``docs/tables.py``.
        billions: Parameters.
        active: Billions of parameters that a token uses; ``None`` for all.
        gb: Size of its files, where it was read.
        format: Of its weights.
        licence: As its page says.
        base: Checkpoint that is served, of a repository that holds only an adapter for it.
    """

    id: str
    source: str
    billions: float
    active: float | None = None
    gb: float | None = None
    format: str = "BF16"
    licence: str = ""
    base: str | None = None

    @property
    def weights_gb(self) -> float:
        """GB of its weights: of its files, or two bytes a parameter (NVFP4: three quarters)."""
        return self.gb or self.billions * {"BF16": 2.0, "FP8": 1.08, "NVFP4": 0.75}[self.format]

    @property
    def num_gpus(self) -> int:
        """GPUs that share it: a power of two, which divides its heads."""
        needed = self.weights_gb + _BESIDE_WEIGHTS
        return 1 if needed <= _CARDS[-1] else 2 ** math.ceil(math.log2(needed / _SHARED))

    @property
    def memory(self) -> str:
        """An estimate of the GPUs that hold it."""
        if self.num_gpus > 1:
            return f"{self.num_gpus} x {_SHARED} GB"
        needed = self.weights_gb + _BESIDE_WEIGHTS
        return f"{next(card for card in _CARDS if needed <= card)} GB"


@dataclass(frozen=True)
class CheckpointFamily:
    """Checkpoints that one command line serves.

    Attributes:
        name: For users.
        architecture: In their ``config.json``.
        checkpoint: The checkpoints.
        checked: What was held to what.
        open: What is not known.
        options: Of ``vllm serve``, where ``{id}`` stands for the checkpoint's.
    """

    name: str
    architecture: str
    checkpoint: tuple[Checkpoint, ...]
    checked: str
    open: str
    options: str = ""

    def command(self, checkpoint: Checkpoint) -> str:
        """Return the line that serves one of the checkpoints."""
        num_gpus = checkpoint.num_gpus
        ranks = f"--tensor-parallel-size {num_gpus}" if num_gpus > 1 else ""
        options = self.options.replace("{id}", checkpoint.id)
        served = checkpoint.base or checkpoint.id
        return " ".join(filter(None, ["vllm serve", served, options, ranks]))


@cache
def checkpoint_families() -> tuple[CheckpointFamily, ...]:
    """Read ``checkpoints.toml``."""
    text = files("vllm_diffusion.families").joinpath("checkpoints.toml").read_text(encoding="utf-8")
    return tuple(_family(**family) for family in tomllib.loads(text)["family"])


def _family(checkpoint: list[dict[str, Any]], licence: str, **family: str) -> CheckpointFamily:
    rows = tuple(Checkpoint(**{"licence": licence, **row}) for row in checkpoint)
    return CheckpointFamily(checkpoint=rows, **family)
