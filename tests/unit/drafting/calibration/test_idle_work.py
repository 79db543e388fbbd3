"""Commands that run while nobody else has work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_diffusion.drafting.calibration.idle_work import IdleWork, IdleWorkError

GIB = 2**30
# Writes a line every few milliseconds, and ends when a file appears.
WRITES = """
import os, sys, time
folder = sys.argv[1]
with open(folder + "/lines", "w", buffering=1) as lines:
    while not os.path.exists(folder + "/end"):
        lines.write("x")
        lines.flush()
        time.sleep(0.005)
print("niceness", os.nice(0))
"""


def work(is_busy: Callable[[], bool] = lambda: False, **caps: float) -> IdleWork:
    said: list[str] = []
    options = {"seconds": 60.0, "max_bytes": 8 * GIB} | caps
    made = IdleWork(is_busy, options["seconds"], int(options["max_bytes"]), said.append)
    made.said = said  # type: ignore[attr-defined]
    return made


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_output_and_failure() -> None:
    """What a command printed, or its last line where it fails."""
    assert work().run("counting", python("print(1 + 1)")) == "2\n"
    with pytest.raises(IdleWorkError, match="counting failed: no such thing"):
        work().run("counting", python("import sys; sys.exit('no such thing')"))


def test_halted_while_busy(tmp_path: Path) -> None:
    """Not a line is written meanwhile, and the time does not count; niced."""
    lines = tmp_path / "lines"
    sizes: list[int] = []

    def is_busy() -> bool:
        if not lines.exists() or not lines.stat().st_size:
            return False
        sizes.append(lines.stat().st_size)
        # Ten looks; the last one lets it go on, and end.
        if len(sizes) == 10:
            (tmp_path / "end").touch()
        return len(sizes) < 10

    made = work(is_busy)
    start = time.monotonic()
    printed = made.run("writing", python(WRITES, str(tmp_path)))
    assert printed == "niceness 19\n"
    # The first look is before the signal.
    assert len(set(sizes[1:10])) == 1
    assert made.said == ["writing: halted, the server has work", "writing: goes on"]
    assert made.spent < time.monotonic() - start - 1


def test_caps(tmp_path: Path) -> None:
    """Of time, over several commands, and of memory; nothing is left running."""
    made = work(seconds=1.0)
    made.run("a first", python("import time; time.sleep(0.3)"))
    assert 0.2 < made.spent < 1
    with pytest.raises(IdleWorkError, match=r"a second reached the cap of 0\.0166667 minutes"):
        made.run("a second", python(WRITES, str(tmp_path)))
    size = (tmp_path / "lines").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "lines").stat().st_size == size
    with pytest.raises(IdleWorkError, match=r"filling reached the cap of 0\.0625 GiB of memory"):
        work(max_bytes=GIB / 16).run(
            "filling", python("import time; x = bytearray(2**27); time.sleep(60)")
        )
