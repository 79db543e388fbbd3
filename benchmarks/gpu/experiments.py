"""The experiments of the campaign, as ``experiments.toml`` lists them."""

import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Experiment:
    """One command that answers one question; ``experiments.toml`` says what each field is."""

    name: str
    answers: str
    script: str
    expected: float
    limit: float
    memory_gib: int = 0
    decides: str = ""
    otherwise: str = ""

    def command(self, data: str, out: str) -> list[str]:
        """Words to run, with the file of its rows and its folder."""
        path, *options = shlex.split(self.script.replace("{out}", shlex.quote(out)))
        return [sys.executable, f"benchmarks/{path}", "--data", data, *options]


_FILE = Path(__file__).with_name("experiments.toml")
EXPERIMENTS = tuple(
    Experiment(name, **fields)
    for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
)
