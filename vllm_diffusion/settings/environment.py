"""The package's environment variables: the only place that reads them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class EnvironmentFlags:
    """The package's environment variables.

    Attributes:
        disabled: ``VLLM_DIFFUSION_DISABLE=1``: both entry points do nothing; stock vLLM serves.
        force_cpu: ``VLLM_DIFFUSION_CPU=1``: use the CPU even where there is a GPU.
    """

    disabled: bool
    force_cpu: bool


def environment_flags() -> EnvironmentFlags:
    """Read the environment now; child processes inherit it, so every process sees the same."""
    return EnvironmentFlags(
        disabled=os.environ.get("VLLM_DIFFUSION_DISABLE", "") == "1",
        force_cpu=os.environ.get("VLLM_DIFFUSION_CPU", "") == "1",
    )
