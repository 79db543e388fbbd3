"""The experiments of the campaign (``experiments.toml``), and what a machine lacks for one."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Minutes that an experiment may take with its start.
MOST_MINUTES = 8
# Minutes that all of them take together where they take what is expected.
ALL_MINUTES = 70
# Major compute capability that the kernels are written for.
LEAST_CAPABILITY = 8


@dataclass(frozen=True)
class Experiment:
    """One command that answers one question; ``experiments.toml`` says what each field is."""

    name: str
    answers: str
    script: str
    toy: str
    expected: float
    limit: float
    vllm: bool = False
    memory_gib: int = 0
    on_gpu_alone: bool = False

    def command(self, toy: bool, data: str, out: str) -> Sequence[str]:
        """Words to run, at full or toy size, with the file of its rows and its folder."""
        path, *options = shlex.split(self.toy if toy else self.script)
        options = [option.format(out=out) for option in options]
        return [sys.executable, f"benchmarks/{path}", "--data", data, *options]

    def lacks(self, facts: dict[str, Any], toy: bool) -> str | None:
        """Why it cannot run on a machine; ``None`` if it can.

        Args:
            facts: What ``machine.describe`` returned; at toy size of a machine whose GPU is hidden.
            toy: Whether it would run at toy size.
        """
        gpu = facts["gpu"]
        if gpu is None and (self.on_gpu_alone or not toy):
            driver = f"driver {facts['driver']}" if facts["driver"] else "no NVIDIA driver answers"
            return f"no GPU that torch {facts['torch']} can use: {facts['why_no_gpu']} ({driver})"
        if gpu is not None and int(facts["capability"].partition(".")[0]) < LEAST_CAPABILITY:
            capability = facts["capability"]
            return f"{gpu} has compute capability {capability}, and this needs {LEAST_CAPABILITY}.0"
        if gpu is not None and facts["memory_gib"] < self.memory_gib:
            return f"{gpu} has {facts['memory_gib']} GiB, and this needs {self.memory_gib}"
        return "vLLM is not installed" if self.vllm and facts["vllm"] is None else None


_FILE = Path(__file__).with_name("experiments.toml")
EXPERIMENTS = tuple(
    Experiment(name, **fields)
    for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
)
