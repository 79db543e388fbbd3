"""Tests of the package on other Pythons that it supports, in environments of their own."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.engines import commands

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.13", "3.12")
# Of the parts that differ most from Python to Python: settings, schemas, start-up and the engine's
# process.
TESTS = (
    "tests/unit/decoding/test_layouts.py",
    "tests/unit/requests/test_arguments.py",
    "tests/unit/requests/test_json_schema.py",
    "tests/unit/startup/test_published_checkpoints.py",
    "tests/integration/test_sampling_params.py",
)


def interpreter(version: str) -> str | None:
    """Return the path of a Python that pyenv or the system has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def run(*command: str, **options: object) -> str:
    """Return what a command prints in an environment without what these tests have set."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return commands.run(*command, env=environment, **options).stdout


@pytest.mark.parametrize("place", range(len(VERSIONS)))
def test_it_installs_answers_and_passes_tests(place: int, tmp_path: Path) -> None:
    """A wheel installs with another Python, answers in the demo, and passes tests there."""
    installed = [path for path in map(interpreter, VERSIONS) if path]
    if place >= len(installed):
        pytest.skip(f"needs {place + 1} of Python {' and '.join(VERSIONS)}")
    python = installed[place]
    uv = str(Path(sys.executable).with_name("uv"))
    run(uv, "build", "--wheel", "--out-dir", str(tmp_path), cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    own = tmp_path / "venv/bin"
    run(uv, "venv", "--python", python, str(own.parent))
    tools = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pillow")
    run(uv, "pip", "install", "--python", str(own / "python"), str(wheel), *tools, cwd=tmp_path)
    assert "15" in run(str(own / "vllm-diffusion"), "demo", "What is 7+8?", cwd=tmp_path)
    said = run(str(own / "python"), "-m", "pytest", "-q", "-m", "not slow", *TESTS, cwd=ROOT)
    assert " passed" in said
    assert "failed" not in said
