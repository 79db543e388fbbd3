"""A stand-in for the process that checks kernels: each is right, or fails as it is told.

    python -m tests.support.kernel_stand_ins DEVICE PIPE

``STAND_INS`` is a JSON object: part of a case's name -> how it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__)))
RIGHT = {"state": "right", "difference": 1e-3, "goes_on": True}
WRONG = {"state": "wrong", "why": "attention: error 1.2 exceeds 0.01", "goes_on": True}


def main() -> None:
    pipe = Connection(int(sys.argv[2]))
    answer = pipe.send
    fates = json.loads(os.environ.get("STAND_INS", "{}"))
    if "start" in fates:
        answer({"state": "unknown", "why": fates["start"]})
        return
    answer({"state": "right", "goes_on": True})
    log = os.environ.get("STAND_INS_LOG")
    while True:
        name = pipe.recv()["name"]
        if log:
            with Path(log).open("a") as file:
                file.write(name + "\n")
        fate = next((fate for part, fate in fates.items() if part in name), "right")
        answer({"state": "begins"})
        match fate:
            case "right":
                answer(RIGHT)
            case "wrong":
                answer(WRONG)
            case "refuses":
                answer({"state": "refused", "why": "takes head_dim 256", "goes_on": True})
            case "raises":
                answer({"state": "wrong", "why": "CompilationError: no such instruction"})
                return
            case "out of memory":
                answer({"state": "unknown", "why": "out of memory"})
                return
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exits":
                print("ptxas: not found", file=sys.stderr)
                sys.exit(3)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(3600)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()
