"""The process that runs cases: ``python -m vllm_diffusion.kernel_choice.child DEVICE PIPE``.

Through a pipe that it inherits it receives cases one by one, and sends the outcome of each.
"""

from __future__ import annotations

import faulthandler
import functools
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from attention_kernels import checks
from attention_kernels.checks import Checked
from vllm_diffusion.kernel_choice.cases import KernelCase
from vllm_diffusion.kernel_choice.process import BEGINS

REPEATS = 20
# More than any GPU's cache holds.
CACHE_BYTES = 256 * 2**20
Run = Callable[[KernelCase, torch.device, Callable[[], None]], Checked]


def run_case(
    case: KernelCase, device: torch.device, begins: Callable[[], None] = lambda: None
) -> Checked:
    """Check every shape of a case.

    Args:
        case: What is checked.
        device: Where it runs.
        begins: Called before each shape.

    Returns:
        The last shape's, with the largest difference of all.
    """
    results = []
    for shape in case.shapes or (None,):
        begins()
        results.append(_check(case, shape, device))
    return results[-1]._replace(difference=max(each.difference for each in results))


def _check(case: KernelCase, shape: Any, device: torch.device) -> Checked:
    match case.kernel:
        case "device":
            return checks.check_device(device)
        case "noise":
            return checks.check_noise(device)
        case "attention":
            return checks.check_attention(shape, case.impl, device)  # type: ignore[arg-type]
        case "statistics":
            return checks.check_statistics(shape, case.impl, device)  # type: ignore[arg-type]
        case "kept rows":
            return checks.check_kept_rows(shape, case.impl, device)  # type: ignore[arg-type]


def outcome_of(check: Callable[[], Checked], measures: bool) -> dict[str, Any]:
    """Run a check, and return its outcome as plain data.

    Args:
        check: The check.
        measures: True to time the kernel too.
    """
    try:
        checked = check()
        _wait()
    except AssertionError as error:
        return {"state": "wrong", "why": _one_line(error), "goes_on": True}
    except (NotImplementedError, ValueError) as error:
        # Refusals of an implementation, before anything is launched.
        return {"state": "refused", "why": _one_line(error), "goes_on": True}
    except torch.OutOfMemoryError:
        return {"state": "unknown", "why": "out of memory"}
    except (AttributeError, LookupError, ImportError) as error:
        # Of the check, which shows nothing about the kernel.
        return {"state": "unknown", "why": f"{type(error).__name__}: {_one_line(error)}"}
    except Exception as error:
        return {"state": "wrong", "why": f"{type(error).__name__}: {_one_line(error)}"}
    outcome = {"state": "right", "difference": checked.difference, "goes_on": True}
    if measures:
        outcome["microseconds"] = round(seconds_of(checked.call) * 1e6, 1)
    return outcome


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of a call, of several that follow each other."""
    for _ in range(3):
        call()
    clock = _gpu_seconds if torch.cuda.is_available() else _host_seconds
    return statistics.median(clock(call) for _ in range(REPEATS))


def _gpu_seconds(call: Callable[[], object]) -> float:
    """Return the time of a call on the GPU, whose cache does not hold what it reads."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # While it is written the host gets ahead, so that its launches are not what is measured.
    torch.zeros(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    begin.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def _host_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _wait() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def serve(check: Run = run_case) -> None:
    """Answer cases until no more come, or one may have broken the device's context.

    Args:
        check: Runs a case, as :func:`run_case`.
    """
    pipe = Connection(int(sys.argv[2]))
    try:
        device = torch.device(sys.argv[1])
        torch.zeros(1, device=device)
    except Exception as error:
        pipe.send({"state": "unknown", "why": _one_line(error)})
        return
    pipe.send({"state": "right"})
    outcome: dict[str, Any] = {"goes_on": True}
    # After an illegal access nothing runs any more in the context.
    while outcome.get("goes_on"):
        try:
            request = pipe.recv()
        except EOFError:
            return
        case = pickle.loads(request["case"])

        def begins(seconds: float = request["seconds"]) -> None:
            pipe.send(BEGINS)
            # Where the caller is gone, nobody else ends what hangs.
            faulthandler.dump_traceback_later(seconds + 10, exit=True)

        outcome = outcome_of(functools.partial(check, case, device, begins), request["measures"])
        faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)


if __name__ == "__main__":
    serve()
