"""The check that a server makes of its kernels on a GPU where they have not been checked before."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_diffusion.kernel_choice.cases import KernelCase, Role, Served
from vllm_diffusion.kernel_choice.process import CannotCheckError, CheckProcess, Outcome
from vllm_diffusion.kernel_choice.record import Record, facts_of
from vllm_diffusion.startup.kernel_choices import KernelChoices, PassPhase

logger = logging.getLogger("vllm.vllm_diffusion")

# Of a whole check at a start; what it does not reach is checked by the next start.
SECONDS = 60.0
REPORT = "vllm-diffusion doctor --gpu --report FILE"
# What it costs that a kernel does not serve.
COSTS = {
    "cache writes, reference": "attention leaves the CUDA graphs",
    "attention, reference": "attention leaves the CUDA graphs and takes many times as long",
    "statistics, reference": "each step of the sampler takes longer and more memory",
    "kept rows, reference": "filters and log-probabilities take longer",
    "step graph": "each step launches the sampler's kernels one by one, some milliseconds a pass",
    "attention graph": "attention is launched outside CUDA graphs, some milliseconds a pass",
}

Check = Callable[[KernelCase], Outcome]


UNCHECKED = """--additional-config '{"diffusion": {"self_check": "off"}}'"""


class NothingRightError(RuntimeError):
    """No implementation of a kernel is right on this GPU.

    Attributes:
        keys: Keys of the kernel's cases.
    """

    def __init__(self, message: str, keys: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.keys = keys


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
        kernel = self.case.kernel
        cost = COSTS.get(kernel) or COSTS.get(f"{kernel}, {self.by}", "its speed may differ")
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
    choices = served.step.kernels
    for role in served.roles():
        impl = _first_right(role, check, replaced)
        choices = _with(choices, role, impl)
    served = replace(served, step=replace(served.step, kernels=choices))
    for role in served.graph_roles():
        (case,) = role.cases
        outcome = check(case)
        if outcome.state == "wrong":
            replaced.append(Replaced(case, outcome.why, "the call without a graph"))
            if case.kernel == "step graph":
                choices = replace(choices, step_graphs=False)
            else:
                choices = replace(choices, attention_graphs=False)
    return choices, replaced


def _first_right(role: Role, check: Check, replaced: list[Replaced]) -> str:
    """Return the implementation that serves, and note those before it that do not."""
    passed: list[tuple[KernelCase, Outcome]] = []
    for case in role.cases:
        outcome = check(case)
        # What says nothing about a kernel leaves it where it is.
        if outcome.state in ("right", "unknown"):
            wrong = [each for each in passed if each[1].state == "wrong"]
            replaced += [Replaced(failed, each.why, by=case.impl) for failed, each in wrong]
            return case.impl
        passed.append((case, outcome))
    case, outcome = passed[0]
    if case.kernel == "device":
        problem = f"This GPU computes wrongly without any kernel of this package ({outcome.why})"
    else:
        problems = "; ".join(f"{each.impl}: {outcome.why}" for each, outcome in passed)
        kernel = case.name.rpartition(",")[0] or case.name
        problem = f"No implementation of {kernel} is right on this GPU ({problems})"
    raise NothingRightError(
        f"{problem}, so nothing is served. Check the GPU and its driver with another program. The next start "
        f"checks it again; {UNCHECKED} starts without the check, and answers may be wrong then. Report "
        f"this with the output of: {REPORT}",
        frozenset(each.key for each, _ in passed),
    )


def _with(choices: KernelChoices, role: Role, impl: Any) -> KernelChoices:
    """Return the choices with the implementation of a role."""
    case = role.cases[0]
    if impl == case.impl or role.cases[0].kernel in ("device", "noise"):
        return choices
    if role.kind is not None and role.phase is not None:
        name = role.kind.name
        phases: dict[PassPhase, Any] = {**choices.attention.get(name, {}), role.phase: impl}
        return replace(choices, attention={**choices.attention, name: phases})
    if case.kernel == "statistics":
        # The reference waits for the device where it leaves ids out.
        choices = replace(choices, skip_unlikely=False)
    return replace(choices, **{case.kernel.replace(" ", "_"): impl})


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
        # Behind the lock: another start's check is not this one's time.
        began = time.monotonic()
        known = {} if forgets else record.read()

        def check(case: KernelCase) -> Outcome:
            if case.key not in known:
                fresh[case.key] = known[case.key] = process.check(case)
            return known[case.key]

        try:
            choices, replaced = _choose_anew(served, check, known, fresh)
        except CannotCheckError as error:
            logger.warning(
                "Self-check skipped, the kernels serve unchecked: no process could use the GPU (%s). "
                "Where it has room for one, vllm-diffusion doctor --gpu checks them.",
                error,
            )
            return served.step.kernels
        finally:
            lasting = {key: each for key, each in known.items() if each.state != "unknown"}
            if lasting.keys() & fresh.keys():
                record.write(lasting)
    if record.problem:
        logger.warning("Self-check: %s.", record.problem)
    for each in replaced:
        logger.warning("%s", each.line())
    _log_counts(known, fresh, gpu, time.monotonic() - began)
    return choices


def _choose_anew(
    served: Served, check: Check, known: dict[str, Outcome], fresh: dict[str, Outcome]
) -> tuple[KernelChoices, list[Replaced]]:
    """Choose as :func:`choose`; what keeps a server from starting is checked by each start, and not remembered.

    Args:
        served: As for :func:`choose`.
        check: As for :func:`choose`.
        known: Outcomes by case; those that nothing serves by are removed.
        fresh: Outcomes of this start.
    """
    try:
        return choose(served, check)
    except NothingRightError as error:
        remembered = error.keys & known.keys() - fresh.keys()
        for key in error.keys:
            known.pop(key, None)
        if not remembered:
            raise
    try:
        return choose(served, check)
    except NothingRightError as error:
        for key in error.keys:
            known.pop(key, None)
        raise


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
