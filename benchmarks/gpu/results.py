"""Results of the campaign on disk: a folder for one commit on one machine, a file an experiment."""

import json
import os
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import records

# Where results that are to be reported are kept.
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Origin:
    """What results must have in common to stand in one figure.

    Attributes:
        commit: Commit of the checkout.
        machine: GPU, driver and versions.
    """

    commit: str
    machine: dict[str, Any]

    def __str__(self) -> str:
        named = [name for name in ("driver", "torch", "triton", "vllm") if self.machine[name]]
        versions = [f"{name} {self.machine[name]}" for name in named]
        return ", ".join([self.machine["gpu"], *versions, f"commit {self.commit[:12]}"])


@dataclass(frozen=True)
class Result:
    """What became of an experiment.

    Attributes:
        experiment: Its name.
        state: ``"cut"`` if it was ended before it ended by itself: its rows count, as far as they
            go.
        reason: Why it was cut or failed; empty if it is done.
        command: What one would type to run it.
        origin: Where it ran.
        started: Date and time, UTC.
        seconds: How long it took with its start.
        rows: What it measured, each with its ``table``.
        log: The end of what it printed, where it did not end well.
    """

    experiment: str
    state: Literal["done", "failed", "cut"]
    reason: str
    command: str
    origin: Origin
    started: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


Found = dict[str, Result]


def write(folder: Path, result: Result) -> None:
    """Put a result on disk, whole or not at all."""
    path = folder / f"{result.experiment}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(folder: Path) -> Found:
    """The results of a folder, by experiment; of one that the campaign's end cut off, the rows
    until then.

    Raises:
        ValueError: If a file is not a result.
    """
    found = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            origin = Origin(data["origin"]["commit"], data["origin"]["machine"])
            rows = data["rows"] or records.read(path.with_suffix(".jsonl"))
            result = Result(**(data | {"origin": origin, "rows": rows}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a result of the campaign: {error}") from error
        found[result.experiment] = result
    return found


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside the rows of its results, from ``facts.toml`` in its folder.

    Attributes:
        stock_attention: Attention back end of stock's server, for rows that do not name it.
        figures: What was measured beside the experiments: ``text`` and ``measured``, and where
            there are any ``predicted``, ``peer`` and the ``experiment`` whose question it answers.
        outdated: Experiments whose figures the document has no more; their rows stay here.
    """

    stock_attention: str | None = None
    figures: list[dict[str, str]] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """Results of one commit on one machine.

    Attributes:
        origin: Of all of them.
        found: By experiment.
        facts: What is known beside them.
    """

    origin: Origin
    found: Found
    facts: Facts = field(default_factory=Facts)

    @property
    def started(self) -> str:
        """Date and time, UTC, of its first experiment."""
        return min(result.started for result in self.found.values())


def read_facts(folder: Path) -> Facts:
    """What is known of a folder's run beside its results.

    Raises:
        ValueError: If the file is not as :class:`Facts` describes it.
    """
    path = folder / "facts.toml"
    if not path.is_file():
        return Facts()
    try:
        return Facts(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not read: {error}") from error


def read_all(folders: list[Path]) -> list[Run]:
    """Results by their folder and their origin: somebody may have copied those of two runs into one
    folder.
    """
    runs: dict[tuple[Path, str], Run] = {}
    for folder in folders:
        facts = read_facts(folder)
        for name, result in read(folder).items():
            run = runs.setdefault((folder, str(result.origin)), Run(result.origin, {}, facts))
            run.found[name] = result
    return list(runs.values())
