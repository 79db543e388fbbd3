"""The check that a server makes of its kernels on a GPU where they have not been checked before."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_diffusion.kernel_choice.cases import KernelCase, Role, Served
from vllm_diffusion.kernel_choice.process import CannotCheckError, CheckProcess, Outcome
from vllm_diffusion.kernel_choice.record import Record, facts_of
from vllm_diffusion.startup.kernel_choices import KernelChoices

logger = logging.getLogger("vllm.vllm_diffusion")

# Of a whole check at a start; what it does not reach is checked by the next start.
SECONDS = 60.0
REPORT = "vllm-diffusion doctor --gpu --report FILE"
# What it costs that a kernel does not serve.
COSTS = {
    "attention, reference": "attention leaves the CUDA graphs and takes many times as long",
    "statistics, reference": "each step of the sampler takes longer and more memory",
    "kept rows, reference": "filters and log-probabilities take longer",
}

Check = Callable[[KernelCase], Outcome]


UNCHECKED = """--additional-config '{"diffusion": {"self_check": "off"}}'"""


class NothingRightError(RuntimeError):
    """No implementation of a kernel is right on this GPU."""


@dataclass(frozen=True)
class Replaced:
    """A kernel that does not serve.

    Attributes:
        case: The kernel.
        why: What is wrong with it.
        by: What serves in its place.
    """

    case: KernelCase
    why: str
    by: str

    def line(self) -> str:
        """Return a warning: what, why, what it costs, how to report it."""
        cost = COSTS.get(f"{self.case.kernel}, {self.by}", "its speed may differ")
        return (
            f"Self-check: {self.case.name} fails on this GPU ({self.why}). In its place serves "
            f"{self.by}: {cost}. Please report it with what this writes: {REPORT}"
        )


def choose(served: Served, check: Check) -> tuple[KernelChoices, list[Replaced]]:
    """Choose implementations that are right.

    Args:
        served: What is served, with the implementations that are wanted.
        check: Checks a case.

    Returns:
        The choices, and the kernels that were replaced.

    Raises:
        NothingRightError: Naming the kernel.
    """
    replaced: list[Replaced] = []
    choices = served.choices
    for role in served.roles():
        impl = _first_right(role, check, replaced)
        if impl == next(iter(role.ways)):
            continue
        choices = replace(choices, **{role.kernel.replace(" ", "_"): impl})  # type: ignore[arg-type]
    return choices, replaced


def _first_right(role: Role, check: Check, replaced: list[Replaced]) -> str:
    """Return the implementation that serves, and note what is wrong with those before it."""
    failed: list[tuple[KernelCase, Outcome]] = []
    for impl, parts in role.ways.items():
        ran = [_outcome_of_part(part, check) for part in parts]
        # What shows nothing about a kernel leaves it where it is.
        bad = [each for each in ran if each[1].state in ("wrong", "refused")]
        if not bad:
            wrong = [each for each in failed if each[1].state == "wrong"]
            replaced += [Replaced(case, outcome.why, by=impl) for case, outcome in wrong]
            return impl
        failed += [each for each in bad if each not in failed]
    _, outcome = failed[0]
    if role.kernel == "device":
        problem = f"This GPU computes wrongly without any kernel of this package ({outcome.why})"
    else:
        problems = "; ".join(f"{case.name}: {outcome.why}" for case, outcome in failed)
        problem = f"No implementation of {role.kernel} is right on this GPU ({problems})"
    raise NothingRightError(
        f"{problem}, so nothing is served. Check the GPU and its driver with another program. The next start "
        f"checks it again; {UNCHECKED} starts without the check, and answers may be wrong then. Report "
        f"this with the output of: {REPORT}"
    )


def _outcome_of_part(part: tuple[KernelCase, ...], check: Check) -> tuple[KernelCase, Outcome]:
    """Return the first case of a part that takes its inputs, or the last one, with its outcome."""
    for case in part:
        outcome = check(case)
        if outcome.state != "refused":
            break
    return case, outcome


def checked_choices(
    served: Served, *, device: str, gpu: str, folder: Path, forgets: bool
) -> KernelChoices:
    """Return choices that are right on a GPU, from earlier checks as far as these know.

    Args:
        served: What is served, with the implementations that are wanted.
        device: For example ``"cuda:0"``.
        gpu: Name of the GPU, with its compute capability.
        folder: vLLM's cache directory.
        forgets: True to check everything anew.

    Raises:
        NothingRightError: Naming the kernel.
    """
    record = Record(folder, facts_of(gpu))
    fresh: dict[str, Outcome] = {}
    with record.locked(), CheckProcess(device, seconds=SECONDS) as process:
        # After the lock: another start's check is not this one's time.
        began = time.monotonic()
        known = {} if forgets else record.read()

        def check(case: KernelCase) -> Outcome:
            if case.key not in known:
                fresh[case.key] = known[case.key] = process.check(case)
            return known[case.key]

        try:
            choices, replaced = choose(served, check)
        except CannotCheckError as error:
            logger.warning(
                "Self-check skipped, the kernels serve unchecked: no process could use the GPU (%s). "
                "Where it has room for one, vllm-diffusion doctor --gpu checks them.",
                error,
            )
            return served.choices
        finally:
            # What is wrong is checked, and reported, by each start.
            lasting = {k: each for k, each in known.items() if each.state in ("right", "refused")}
            if lasting.keys() & fresh.keys():
                record.write(lasting)
    if record.problem:
        logger.warning("Self-check: %s.", record.problem)
    for each in replaced:
        logger.warning("%s", each.line())
    _log_counts(known, fresh, gpu, time.monotonic() - began)
    return choices


def _log_counts(
    known: dict[str, Outcome], fresh: dict[str, Outcome], gpu: str, seconds: float
) -> None:
    """One line of what was checked; and one of what could not be."""
    states = Counter(each.state for each in known.values())
    how = f"{len(fresh)} checked in {seconds:.1f} s" if fresh else "all remembered"
    logger.info(
        "Self-check of the kernels on %s: %d right, %d wrong (%s).",
        gpu,
        states["right"],
        states["wrong"],
        how,
    )
    unknown = {key: each for key, each in known.items() if each.state == "unknown"}
    if unknown:
        key, first = next(iter(unknown.items()))
        logger.warning(
            "Self-check: nothing is known of %d kernels, which serve unchecked, the first being %s (%s); "
            "the next start checks them.",
            len(unknown),
            key.partition(" [")[0],
            first.why,
        )
