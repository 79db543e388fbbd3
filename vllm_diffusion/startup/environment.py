"""Environment variables: the package's own, which only this module reads, and two of vLLM's."""

from __future__ import annotations

import os
from dataclasses import dataclass

# Limit for answers to one prompt if the operator sets none. vLLM's 16,384 would keep a server busy
# with one request for minutes; OpenAI's own limit is 128.
MOST_ANSWERS = 128
_LIMIT = "VLLM_MAX_N_SEQUENCES"


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


def await_engine_at_shutdown() -> None:
    """Set vLLM's shutdown timeout, so that a server waits until its engine has ended open requests.

    Otherwise vLLM's server kills the engine at once: requests that the engine has not ended by then
    wait until their clients give up, and so does the server. vLLM waits only if the variable is
    set; its default of 5 s is set here, and an operator's own value stays.
    """
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "5")


def limit_answers() -> int | None:
    """Lower vLLM's limit of ``n`` for this process and its children, unless it is set.

    Returns:
        The new limit; ``None`` where one was set before.
    """
    if _LIMIT in os.environ:
        return None
    os.environ[_LIMIT] = str(MOST_ANSWERS)
    return MOST_ANSWERS
