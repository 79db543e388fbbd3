"""Checkpoints loaded on the null GPU's platform, where vLLM chooses a GPU's layers; their tensors stay on the CPU."""

from __future__ import annotations

from pathlib import Path

from tests.support.loading import load, one_rank


def load_each(folders: list[str]) -> list[str]:
    """For each checkpoint what refused it, or nothing."""
    outcomes = []
    with one_rank():
        for folder in folders:
            try:
                load(Path(folder))
            except (AttributeError, NotImplementedError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            else:
                outcomes.append("")
    return outcomes
