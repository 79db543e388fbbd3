"""Checks of the kernels, each timed, in a process of their own: one that crashes or hangs is a
result.
"""

import faulthandler
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any, Literal

import torch

from attention_kernels import checks
from attention_kernels.checks import Checked
from vllm_diffusion.cli.console import one_line
from vllm_diffusion.cli.kernel_cases import KernelCase

REPEATS = 20
# More than any GPU's cache holds.
CACHE_BYTES = 256 * 2**20
# Limit for one case; a compiler takes most of it.
CASE_SECONDS = 300.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case.

    Attributes:
        state: ``"refused"`` where the implementation does not take such inputs or such a GPU, and
            ``"unknown"`` where nothing was learnt about the kernel.
        why: Why it is not right; empty if it is.
        difference: Largest difference from float64.
        microseconds: Time of a call.
        is_last: True where nothing more may run in the process: after an illegal access its context
            is lost.
    """

    state: Literal["right", "wrong", "refused", "unknown"]
    why: str = ""
    difference: float | None = None
    microseconds: float | None = None
    is_last: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what a report holds of it."""
        found = asdict(self)
        del found["is_last"]
        return {name: value for name, value in found.items() if value not in (None, "")}


Check = Callable[[KernelCase, torch.device], Checked]


def run_case(case: KernelCase, device: torch.device) -> Checked:
    """Check every shape of a case.

    Returns:
        The last shape's, with the largest difference of all.
    """
    results = [_check(case, shape, device) for shape in case.shapes or (None,)]
    return results[-1]._replace(difference=max(each.difference for each in results))


def outcomes(
    cases: Iterable[KernelCase], device: str, check: Check = run_case
) -> Iterator[tuple[KernelCase, Outcome]]:
    """Run cases in a process of their own, and in another one after a case that ended or broke it.

    Args:
        cases: One after another.
        device: For example ``"cuda:0"``.
        check: Runs a case; a function of a module.
    """
    remaining = deque(cases)
    while remaining:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            is_last = False
            while remaining and not is_last:
                case = remaining.popleft()
                try:
                    outcome = pool.submit(outcome_of, case, device, check).result()
                except BrokenProcessPool:
                    why = f"its process crashed, or did not end in {CASE_SECONDS:.0f} s"
                    outcome = Outcome("wrong", why, is_last=True)
                yield case, outcome
                is_last = outcome.is_last


def outcome_of(case: KernelCase, device: str, check: Check = run_case) -> Outcome:
    """Check and time a case in this process."""
    # Ends the process in a launch that hangs, too.
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
    try:
        checked = check(case, torch.device(device))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        microseconds = round(seconds_of(checked.call) * 1e6, 1)
    except AssertionError as error:
        return Outcome("wrong", _note(error))
    except (NotImplementedError, ValueError) as error:
        # Refusals of an implementation, before anything is launched.
        return Outcome("refused", _note(error))
    except torch.OutOfMemoryError:
        return Outcome("unknown", "out of memory", is_last=True)
    except (AttributeError, LookupError, ImportError) as error:
        # The check itself failed, which shows nothing about the kernel.
        return Outcome("unknown", f"{type(error).__name__}: {_note(error)}", is_last=True)
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {_note(error)}", is_last=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome("right", difference=checked.difference, microseconds=microseconds)


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


def _note(error: Exception) -> str:
    return one_line(error)[:200]
