"""Tests of the variables that a start sets for bytecode and for the end of a server."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.engines.commands import run
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
# Imports a module that was never compiled, here and in a child; prints the doctor's report of it.
SCRIPT = """
import subprocess, sys
from vllm_diffusion.startup.environment import compile_once
compile_once()
import torch
subprocess.run([sys.executable, "-c", "import vllm"], check=True)
from vllm_diffusion.cli.doctor import environment_facts
print([fact.remedy for fact in environment_facts() if fact.name == "PYTHONDONTWRITEBYTECODE"])
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Create a torch and a vLLM of one line each, where Python finds them first."""
    folder = tmp_path / "packages"
    for name in ("torch", "vllm"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("answer = 42\n")
    return folder


def python(packages: Path, *command: str, **environment: str) -> str:
    paths = os.pathsep.join([str(packages), str(ROOT)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return run(sys.executable, *command, env=kept | {"PYTHONPATH": paths} | environment).stdout


def compiled(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("__init__*.pyc"))


def test_written_once_in_the_cache_folder(packages: Path, tmp_path: Path) -> None:
    """This process and its child write bytecode once to the cache folder, not to the sources."""
    cache = tmp_path / "cache"
    told = python(packages, "-c", SCRIPT, PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME=str(cache))
    written = cache / "vllm-diffusion" / "bytecode"
    assert {"torch", "vllm"} <= set(compiled(written))
    assert not compiled(packages)
    assert written.stat().st_mode & 0o077 == 0
    # It is not the one who sets it that starts `vllm serve` through us.
    assert "compileall" not in told


def test_left_alone(packages: Path, tmp_path: Path) -> None:
    """No bytecode is written if there is some already or if the folder is not writable."""
    cache = tmp_path / "cache"
    settings = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(cache)}
    cache.write_text("no folder")
    assert "compileall" in python(packages, "-c", SCRIPT, **settings)
    cache.unlink()
    python(packages, "-m", "compileall", "-q", str(packages))
    told = python(packages, "-c", SCRIPT, **settings)
    assert not cache.exists()
    assert told.strip() == "[]"


def test_a_folder_of_the_user(packages: Path, tmp_path: Path) -> None:
    """Bytecode is written to the folder that the user has set."""
    mine = tmp_path / "mine"
    python(packages, "-c", SCRIPT, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(mine))
    assert {"torch", "vllm"} <= set(compiled(mine))


# As a user without an entry in the machine's list of users, who has no HOME.
NOBODY = """
import os, pwd, sys
os.environ.pop("HOME", None); os.environ.pop("XDG_CACHE_HOME", None)
def unknown(number): raise KeyError(number)
pwd.getpwuid = unknown
from vllm_diffusion.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["--help", "checkpoint", "demo --help", "doctor --help"])
def test_a_user_without_a_home(command: str, packages: Path, tmp_path: Path) -> None:
    """Commands run for a container's user without a home, and write nothing to the sources."""
    here = tmp_path / "here"
    here.mkdir()
    variables = {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    told = run(sys.executable, "-c", NOBODY, *command.split(), env=variables, cwd=here)
    assert told.stderr == ""
    assert list(here.iterdir()) == []


VARIABLE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


@pytest.mark.parametrize(("family", "awaited"), [("sdar", 5), ("qwen3", 0)])
def test_engine_is_awaited(family: str, awaited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server awaits its engine by vLLM's own option, and an ordinary model's does not."""
    from vllm import EngineArgs
    from vllm.v1.engine.utils import get_engine_process_shutdown_timeout

    monkeypatch.setenv(VARIABLE, "9")
    config = EngineArgs(str(shipped_checkpoint(family)), max_model_len=256).create_engine_config()
    limit = config.shutdown_timeout
    assert limit == 0
    assert get_engine_process_shutdown_timeout(limit, limit) == 9
    monkeypatch.delenv(VARIABLE)
    EngineArgs(str(shipped_checkpoint(family)), max_model_len=256).create_engine_config()
    assert get_engine_process_shutdown_timeout(limit, limit) == awaited
