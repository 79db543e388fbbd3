"""Python on the null GPU: the environment of such a process, and one that forks a child for each
case.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.null_gpu.build import PRELOADED, SITE, SOURCES, build

ROOT = Path(__file__).resolve().parents[3]


def environment(caches: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that finds the null GPU.

    Args:
        caches: Folder for what vLLM, Triton and Inductor compile.
        variables: Further variables; ``NULL_GPU_CAPABILITY`` and ``NULL_GPU_GIB`` choose the
            device.
    """
    folder = build()
    inherited = dict(os.environ)
    # The tests' own processes are on the CPU.
    for name in ("TRITON_INTERPRET", "VLLM_DIFFUSION_CPU", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        inherited.pop(name, None)
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_PRELOAD": ":".join(str(folder / name) for name in PRELOADED),
        # After the null GPU's: NVRTC, since the compiler of vLLM's Humming kernels does not find
        # all of it by itself where CUDA comes from Python packages alone.
        "LD_LIBRARY_PATH": f"{folder}:{SITE / 'nvidia' / 'cu13' / 'lib'}",
        "TRITON_LIBCUDA_PATH": str(folder),
        # Its sitecustomize.py refuses the CPU platform.
        "PYTHONPATH": str(SOURCES / "startup"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Which of several kernels is the fastest is not looked for where none computes.
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **variables,
    }


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        value: What its function returned.
        error: Type and message of what it raised, or how its process ended; ``None`` where it
            returned.
        log: What its process printed.
    """

    value: Any
    error: str | None
    log: Path

    def checked(self) -> Any:
        """The value.

        Raises:
            AssertionError: With the end of the log, if there is none.
        """
        assert self.error is None, f"{self.error}\n{self.text()[-6000:]}"
        return self.value

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class NullGpu:
    """A process on the null GPU that has imported what its cases need, and runs each in a fork of
    its own.

    Imports take most of a case's time otherwise, and a fork leaves nothing for the next case.
    """

    def __init__(
        self,
        folder: Path,
        *,
        imports: str,
        caches: Path | None = None,
        capability: str = "9.0",
        interprets: bool = False,
    ) -> None:
        """Start it.

        Args:
            folder: For logs.
            imports: ``"torch"`` or ``"vllm"``.
            caches: For what is compiled; by default inside ``folder``.
            capability: What imports see. vLLM remembers some of it, so that an engine on another
                device needs another process.
            interprets: Triton's kernels are interpreted, for :mod:`.true_values`.
        """
        self.folder = folder
        command = [sys.executable, "-m", "tests.support.null_gpu.forks", imports]
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NULL_GPU_CAPABILITY": capability}
        if interprets:
            variables["TRITON_INTERPRET"] = "1"
        self._log = (folder / f"{imports}.log").open("wb")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(caches or folder / "caches", **variables),
            text=True,
        )
        self._num_cases = 0

    def run(
        self,
        case: str,
        *,
        capability: str = "9.0",
        gib: float = 0,
        seconds: float = 300,
        variables: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Outcome:
        """Run a function in a fork.

        Args:
            case: The function, as ``module:name``; what it returns must be JSON.
            capability: The device's compute capability.
            gib: Its memory; 0 for as much as the chip of that capability has.
            seconds: When its process is ended.
            variables: Of its environment.
            arguments: Of the function.
        """
        self._num_cases += 1
        log = self.folder / f"{self._num_cases:03}-{case.rpartition(':')[2]}.log"
        request = {
            "case": case,
            "arguments": arguments,
            "capability": capability,
            "gib": gib,
            "seconds": seconds,
            "variables": dict(variables or {}),
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (
            f"the process that forks has ended:\n{Path(self._log.name).read_text()[-4000:]}"
        )
        return Outcome(**json.loads(answer), log=log)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
