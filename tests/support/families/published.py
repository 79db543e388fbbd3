"""Small files of published checkpoints, and what a start makes of them: ``tests/published``."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, Shape, split_experts

FOLDER = Path(__file__).parents[2] / "published"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class PublishedFiles:
    """What was found of a checkpoint's small files.

    Attributes:
        id: Owner and name on the hub.
        revision: Of the files, where there are several; ``""`` otherwise.
        files: Content of each file by its name; an index has the number and size of tensors, and
            the patterns of their names.
        sources: Where each was found, and in what form.
    """

    id: str
    revision: str
    files: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def config(self) -> Any:
        """Content of ``config.json``, empty if it was not found."""
        return self.files.get("config.json", {})

    def write(self, folder: Path, name: str | None = None) -> Path:
        """Write the files except the index into a folder of the checkpoint's name.

        Args:
            folder: Where that folder is made.
            name: Id by which the checkpoint is known instead of its own.
        """
        made = folder / (name or self.id)
        made.mkdir(parents=True)
        for file, content in self.files.items():
            if file != INDEX:
                (made / file).write_text(json.dumps(content))
        return made


@dataclass(frozen=True)
class Expected:
    """What a start makes of a checkpoint.

    Attributes:
        id: Owner and name on the hub.
        files: Its files, or those of a checkpoint that has the same.
        values: What comes out, by name.
        sources: What says each value.
        tensors: Number of tensors, where it was published outside of an index.
        billions: Parameters, where they were published.
    """

    id: str
    files: PublishedFiles
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    tensors: int | None = None
    billions: float | None = None


@dataclass(frozen=True)
class ExpectedDraft:
    """What is read of a draft.

    Attributes:
        id: Owner and name on the hub.
        target: The same of its target.
        files: Its files.
        values: What is read, by name.
        sources: The field of ``config.json`` that says each value, with its section.
        completed: Fields that were not quoted, and without which there is no configuration.
        method: Of ``--speculative-config``.
        starts: False if too little was quoted for a start.
    """

    id: str
    target: str
    files: PublishedFiles
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    completed: Mapping[str, Any]
    method: str = "dflash"
    starts: bool = True


@cache
def published_files() -> tuple[PublishedFiles, ...]:
    """Read what was found of all checkpoints."""
    return tuple(
        PublishedFiles(
            record["id"],
            record.get("revision", ""),
            {name: file["values"] for name, file in record["files"].items()},
            {name: f"{file['source']} ({file['form']})" for name, file in record["files"].items()},
        )
        for record in (json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")))
    )


def files_of(checkpoint: str, revision: str = "") -> PublishedFiles:
    """Return the files of a checkpoint by its id."""
    found = (one for one in published_files() if (one.id, one.revision) == (checkpoint, revision))
    return next(found)


def _table() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "expected.toml").read_text())


def families() -> list[dict[str, Any]]:
    """Read the table of what must come out, by family."""
    table: list[dict[str, Any]] = _table()["family"]
    return table


@cache
def expected_drafts() -> tuple[ExpectedDraft, ...]:
    """Return what must be read of each draft that is in the table."""
    table = _table()
    return tuple(
        ExpectedDraft(
            row["id"],
            row["target"],
            files_of(row["id"]),
            row["values"],
            {**table["of_drafts"], **row.get("sources", {})},
            row.get("completed", {}),
            row.get("method", "dflash"),
            row.get("starts", True),
        )
        for row in table["draft"]
    )


@cache
def expected() -> tuple[Expected, ...]:
    """Return what must come out of each checkpoint that is in the table."""
    return tuple(
        Expected(
            row["id"],
            files_of(row.get("file", row["id"]), row.get("revision", "")),
            {"mask": None, "window": None, **family["values"], **row.get("values", {})},
            family["sources"],
            row.get("tensors"),
            row.get("billions"),
        )
        for family in families()
        for row in family["checkpoint"]
    )


def adapters() -> list[dict[str, Any]]:
    """Read what was found of adapters."""
    table: list[dict[str, Any]] = _table()["adapter"]
    return table


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors for a ``config.json``, with experts one by one."""
    tensors, made = tensors_of(config)
    return split_experts(tensors.shapes(made))


def tensors_of(config: dict[str, Any]) -> tuple[CheckpointTensors, Any]:
    """Return the tensors for a ``config.json``, and its content as a configuration."""
    from transformers import LlamaConfig

    code = config.get("auto_map", {}).get("AutoModelForCausalLM", "").rpartition(".")[2]
    family = next(
        one
        for one in FAMILIES
        if one.architecture in config["architectures"] or code == one.published_as
    )
    config_class = resolve_name(family.config) if family.config else LlamaConfig
    if family.architecture == "DreamModel":
        config_class = resolve_name("vllm_diffusion.families.dream_reasoner.startup:DreamConfig")
    return resolve_name(family.engine_config).checkpoint_tensors(), config_class(**config)
