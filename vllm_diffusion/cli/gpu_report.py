"""``vllm-diffusion doctor --gpu``: whether the kernels are right on this machine's GPU, and how fast."""

from __future__ import annotations

import json
import platform
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli.console import fail, one_line, say, table
from vllm_diffusion.kernel_choice.cases import KernelCase, Served, published_26b
from vllm_diffusion.kernel_choice.on_ranks import gpu_name
from vllm_diffusion.kernel_choice.process import CannotCheckError, CheckProcess, Outcome
from vllm_diffusion.kernel_choice.record import facts_of
from vllm_diffusion.kernel_choice.self_check import NothingRightError, choose
from vllm_diffusion.startup import machine
from vllm_diffusion.startup.plan import plan_of, spec_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = 900.0
HEADER = ("kernel", "result", "largest difference", "microseconds")
# What another implementation of attention must gain to be named.
GAIN = 0.05


def served_models(model: str) -> Iterator[tuple[str, Served]]:
    """Yield what is checked, by a title: a model, or without one the shipped one and the 26B's shape.

    Args:
        model: As for ``vllm serve``; empty for none.
    """
    config = diffusion_config(model or str(shipped_checkpoint()))
    yield config.model_config.architecture, Served.of(config, plan_of(config).kernels)
    if not model:
        yield "DiffusionGemma-26B's shape", published_26b()


def diffusion_config(model: str) -> VllmConfig:
    """Configure the model as a server would.

    Raises:
        ValueError: If a server would refuse it, or none of our kernels would serve it.
    """
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=model).create_engine_config()
    if spec_of(config.model_config) is None:
        raise ValueError(f"{model} is no diffusion model of this package's; name another.")
    return config


def run(model: str, report: Path | None) -> int:
    """Check every implementation of every kernel, print a table, and write a report.

    Args:
        model: As for ``vllm serve``; empty for what is checked without one.
        report: File to write, if any.

    Returns:
        0 if every kernel that would serve is right.
    """
    if (lack := machine.nvidia_lack()) is not None:
        return fail(f"doctor --gpu needs a working NVIDIA GPU: {lack}.")
    facts = facts_of(gpu_name(0))
    say(f"Checking the kernels on {facts['gpu']}; compiling them takes a minute or two.")
    problems: list[str] = []
    checked: dict[str, list[tuple[KernelCase, Outcome]]] = {}
    with CheckProcess("cuda:0", seconds=SECONDS, measures=True) as process:
        try:
            for title, served in served_models(model):
                checked[title] = []
                problems += check_all(served, process, checked[title])
                print(f"\n{title}\n{lines(checked[title])}", flush=True)
                if option := faster_option(checked[title]):
                    print(option)
                if _is_gpu_wrong(checked[title]):
                    break
        except (CannotCheckError, ValueError) as error:
            return fail(f"doctor --gpu cannot check anything: {one_line(error)}")
    for line in problems:
        print(line)
    if report is not None:
        content = {"facts": facts, "system": platform.system(), "problems": problems}
        content["cases"] = {
            title: [{"case": case.name, **outcome.to_json()} for case, outcome in results]
            for title, results in checked.items()
        }
        report.write_text(without_names(json.dumps(content, indent=1)) + "\n", encoding="utf-8")
        say(f"Wrote {report}: no prompts, host names or paths. Please attach it to an issue.")
    return int(bool(problems))


def check_all(
    served: Served, process: CheckProcess, results: list[tuple[KernelCase, Outcome]]
) -> list[str]:
    """Check all implementations, those too that would not serve.

    Args:
        served: What is served.
        process: Runs the cases.
        results: Filled with cases and their outcomes.

    Returns:
        A line for each kernel that would not serve; the first alone if the GPU itself is wrong, since the
        other checks mean nothing then.
    """
    outcomes: dict[str, Outcome] = {}

    def check(case: KernelCase) -> Outcome:
        if case.key not in outcomes:
            outcomes[case.key] = process.check(case)
            results.append((case, outcomes[case.key]))
        return outcomes[case.key]

    for role in served.roles():
        for case in role.cases():
            check(case)
        if _is_gpu_wrong(results):
            break
    try:
        return [each.line() for each in choose(served, check)[1]]
    except NothingRightError as error:
        return [str(error)]


def _is_gpu_wrong(results: list[tuple[KernelCase, Outcome]]) -> bool:
    """Return true if PyTorch's own kernels, which all other checks trust, are wrong."""
    return any(case.kernel == "device" and each.state == "wrong" for case, each in results)


def lines(results: list[tuple[KernelCase, Outcome]]) -> str:
    """Lay out a row for each case, then say why some are not right."""
    rows: list[tuple[str, ...]] = [HEADER]
    for case, outcome in results:
        difference = "" if outcome.difference is None else f"{outcome.difference:.1e}"
        time = "" if outcome.microseconds is None else f"{outcome.microseconds:.1f}"
        rows.append((case.name, outcome.state, difference, time))
    # After the table, whose columns they would widen.
    reasons = [f"{case.name}: {outcome.why}" for case, outcome in results if outcome.why]
    return "\n  ".join([table(rows, indent="  "), *reasons])


def faster_option(results: Sequence[tuple[KernelCase, Outcome]]) -> str:
    """Return the option that serves with a faster attention than the default, and what it gains; or nothing.

    Compared is the last pass of each kind of layer, one after another: canvases after 3,000 tokens.
    """
    times: dict[str, list[float]] = {}
    for case, outcome in results:
        if case.kernel == "attention" and outcome.microseconds is not None:
            times.setdefault(case.impl, []).append(outcome.microseconds)
    default = times.pop("triton", [])
    for impl, others in times.items():
        # Of every kind of layer.
        if default and len(others) == len(default) and sum(others) <= (1 - GAIN) * sum(default):
            option = f"""--additional-config '{{"diffusion": {{"attention": "{impl}"}}}}'"""
            return f"Attention takes {1 - sum(others) / sum(default):.0%} less time with {option}"
    return ""


def without_names(text: str) -> str:
    """Leave out this machine's name, and of each path all but the file's name."""
    text = re.sub(r"(?<![\w.])~?(?:/[\w.+@-]+)+/([\w.+-]+)", r"\1", text)
    return text.replace(socket.gethostname(), "this machine")
