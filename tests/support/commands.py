"""``vllm-diffusion`` in the process of a test."""

from __future__ import annotations

from vllm_diffusion.cli.main import main


def status_of(*arguments: object) -> int:
    """Run a command; its exit status, that of a refused command line too."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as refusal:
        return int(refusal.code or 0)
