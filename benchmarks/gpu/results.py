"""Results of the campaign on disk: a folder for one commit on one machine, a file an experiment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# "running" is what an interrupted run leaves behind, and "cut" an experiment that got less time than
# it may take; both run again.
State = Literal["done", "failed", "timed out", "cut", "not run", "running"]
SETTLED = ("done", "failed", "timed out")
# Where results that are to be reported are kept.
RESULTS = Path(__file__).resolve().parent / "results"


class MixedRunsError(ValueError):
    """A folder holds results of another commit, machine or size."""


@dataclass(frozen=True)
class Origin:
    """What results must have in common to stand in one table.

    Attributes:
        commit: Commit of the checkout.
        sources: Digest of its files, which may have been changed since.
        toy: Whether it was a rehearsal at toy size on the CPU.
        machine: GPU, driver and versions.
    """

    commit: str
    sources: str
    toy: bool
    machine: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of a folder for these results."""
        chip = self.machine["gpu"] or "cpu"
        words = [self.commit[:12], *chip.lower().split(), *["toy"] * self.toy]
        return "-".join(words).replace("/", "-")

    def facts(self) -> dict[str, Any]:
        """Everything that must be equal, by name."""
        return {"commit": self.commit, "sources": self.sources, "toy": self.toy} | self.machine


@dataclass(frozen=True)
class Result:
    """What became of an experiment.

    Attributes:
        experiment: Its name.
        state: See :data:`State`.
        reason: Why it did not run or end; empty if it did.
        command: What one would type to run it.
        origin: Where it ran.
        started: Date and time, UTC.
        seconds: How long it took with its start.
        rows: What it measured, each with its ``table``.
        log: The end of what it printed.
    """

    experiment: str
    state: State
    reason: str
    command: str
    origin: Origin
    started: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


def write(folder: Path, result: Result) -> None:
    """Put a result on disk, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.experiment}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(folder: Path) -> dict[str, Result]:
    """The results of a folder, by experiment.

    Raises:
        ValueError: If a file is no result.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            result = Result(**(data | {"origin": Origin(**data["origin"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of the campaign: {error}") from error
        found[result.experiment] = result
    return found


def check_origin(folder: Path, origin: Origin) -> None:
    """Refuse to add to a folder what would not belong with the rest.

    Raises:
        MixedRunsError: If it holds results of another origin.
    """
    ours = origin.facts()
    for name, result in read(folder).items():
        theirs = result.origin.facts()
        differs = [
            f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
            for key in dict.fromkeys((*ours, *theirs))
            if ours.get(key) != theirs.get(key)
        ]
        if differs:
            raise MixedRunsError(
                f"{folder} holds a result of another run ({name}: {'; '.join(differs)}). Results of "
                "two runs are never mixed: name another folder with --out."
            )


def kept() -> list[Path]:
    """The folders of results in the checkout."""
    return sorted(path for path in RESULTS.glob("*") if path.is_dir())


def read_all(folders: list[Path]) -> list[tuple[Origin, dict[str, Result]]]:
    """Results by their origin, in the order of the folders; one folder may hold several."""
    groups: list[tuple[Origin, dict[str, Result]]] = []
    for folder in folders:
        for name, result in read(folder).items():
            for origin, found in groups:
                if origin == result.origin and name not in found:
                    found[name] = result
                    break
            else:
                groups.append((result.origin, {name: result}))
    return groups
