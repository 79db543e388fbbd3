"""``vllm-diffusion`` in the process of a test, and programs in processes of their own."""

import subprocess
from typing import Any

import pytest

from vllm_diffusion.cli.main import main


def run(*words: object, status: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends, and return what it printed.

    Args:
        words: Its command line.
        status: The exit status that it must have; ``None`` for any.
        options: Of :func:`subprocess.run`.
    """
    command = [str(word) for word in words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert status in (None, ended.returncode), ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended


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
