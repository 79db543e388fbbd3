"""``vllm-diffusion`` in the process of a test."""

import pytest

from vllm_diffusion.cli.main import main


def status_of(*arguments: object) -> int:
    """Run a command; return its exit status, also that of a refused command line."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as refusal:
        return int(refusal.code or 0)


def refusal_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that is refused before it prints anything; return its one line."""
    assert status_of(*arguments) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err
