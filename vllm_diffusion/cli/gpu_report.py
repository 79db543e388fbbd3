"""``vllm-diffusion doctor --gpu``: whether kernels and served answers are right on this machine's
GPU.
"""

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
from vllm_diffusion.cli.gpu_answers import problems as problems_of_answers
from vllm_diffusion.cli.kernel_cases import KernelCase, Served, published_26b
from vllm_diffusion.cli.kernel_checks import Outcome, outcomes
from vllm_diffusion.startup import machine
from vllm_diffusion.startup.gpu_record import facts_of, gpu_name, write_record
from vllm_diffusion.startup.plan import spec_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEADER = ("kernel", "result", "largest difference", "microseconds")
# State of a kernel that serves -> what is wrong.
_NOT_RIGHT = {"wrong": "is wrong", "unknown": "could not be checked"}
# What another implementation of attention must gain to be named.
GAIN = 0.05


def served_models(model: str) -> Iterator[tuple[str, Served]]:
    """Yield what is checked, by a title: a model, or without one the shipped one and the 26B's
    shape.

    Args:
        model: As for ``vllm serve``; empty for none.
    """
    config = diffusion_config(model or str(shipped_checkpoint()))
    yield config.model_config.architecture, Served.of(config)
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
        raise ValueError(f"vllm-diffusion does not serve {model}; name a diffusion model.")
    return config


def run(model: str, report: Path | None) -> int:
    """Check every kernel, then the answers of a server; print what is wrong, and write a report.

    Args:
        model: As for ``vllm serve``; empty for what is checked without one.
        report: File to write, if any.

    Returns:
        0 if every kernel that serves is right, and so are the answers; that is recorded.
    """
    if (lack := machine.nvidia_lack()) is not None:
        return fail(f"doctor --gpu needs a working NVIDIA GPU: {lack}.")
    facts = facts_of(gpu_name(0))
    say(f"Checking the kernels on {facts['gpu']}; compiling them takes a minute or two.")
    problems: list[str] = []
    checked: dict[str, list[tuple[KernelCase, Outcome]]] = {}
    try:
        for title, served in served_models(model):
            results = checked[title] = check_all(served)
            print(f"\n{title}\n{lines(results)}", flush=True)
            problems += problems_of(served, results)
            if option := faster_option(results):
                print(option)
            if _is_gpu_wrong(results):
                break
    except ValueError as error:
        return fail(f"doctor --gpu cannot check anything: {one_line(error)}")
    if not any(map(_is_gpu_wrong, checked.values())):
        say(
            "Serving the shipped checkpoint with the default options, and asking it held-out questions."
        )
        problems += problems_of_answers()
    for line in problems:
        print(line)
    if problem := write_record(facts, is_right=not problems):
        say(problem)
    if report is not None:
        content = {"facts": facts, "system": platform.system(), "problems": problems}
        content["cases"] = {
            title: [{"case": case.name, **outcome.to_json()} for case, outcome in results]
            for title, results in checked.items()
        }
        report.write_text(without_names(json.dumps(content, indent=1)) + "\n", encoding="utf-8")
        say(
            f"Wrote {report}: no prompts of yours, host names or paths. Please attach it to an issue."
        )
    if not problems:
        print("\nThe kernels and the answers are right.")
    return int(bool(problems))


def check_all(served: Served) -> list[tuple[KernelCase, Outcome]]:
    """Check all implementations, those too that do not serve; nothing after a GPU that is wrong by
    itself.
    """
    results = []
    for case, outcome in outcomes(served.cases(), "cuda:0"):
        results.append((case, outcome))
        if _is_gpu_wrong(results):
            break
    return results


def problems_of(served: Served, results: Sequence[tuple[KernelCase, Outcome]]) -> list[str]:
    """Return a line for each kernel that serves and was not found right, with the option that
    avoids it if there is one.

    What refuses its inputs has another implementation in its place.
    """
    if _is_gpu_wrong(results):
        return [
            f"This GPU computes wrongly without any kernel of this package ({results[-1][1].why})"
        ]
    found = []
    for case, outcome in results:
        if outcome.state not in _NOT_RIGHT or not served.serves(case):
            continue
        line = f"{case.name} {_NOT_RIGHT[outcome.state]} on this GPU ({outcome.why})"
        if outcome.state == "wrong" and case.kernel == "attention":
            line += _other_attention(results)
        found.append(line)
    return found


def _other_attention(results: Sequence[tuple[KernelCase, Outcome]]) -> str:
    """Return the option that serves with an attention that is right in all layers, or nothing."""
    states: dict[str, set[str]] = {}
    for case, outcome in results:
        if case.kernel == "attention":
            states.setdefault(case.impl, set()).add(outcome.state)
    right = next((impl for impl, found in states.items() if found == {"right"}), None)
    return "" if right is None else f"; right with {attention_option(right)}"


def attention_option(impl: str) -> str:
    """Return the option with which a server uses this implementation of attention."""
    return f"""--additional-config '{{"diffusion": {{"attention": "{impl}"}}}}'"""


def _is_gpu_wrong(results: Sequence[tuple[KernelCase, Outcome]]) -> bool:
    """Return true if PyTorch's own kernels, which all other checks trust, are wrong."""
    return any(case.kernel == "device" and each.state == "wrong" for case, each in results)


def lines(results: list[tuple[KernelCase, Outcome]]) -> str:
    """Lay out a row for each case, then say why some are not right."""
    rows: list[tuple[str, ...]] = [HEADER]
    for case, outcome in results:
        difference = "" if outcome.difference is None else f"{outcome.difference:.1e}"
        time = "" if outcome.microseconds is None else f"{outcome.microseconds:.1f}"
        rows.append((case.name, outcome.state, difference, time))
    # After the table: within it they would widen its columns.
    reasons = [f"{case.name}: {outcome.why}" for case, outcome in results if outcome.why]
    return "\n  ".join([table(rows, indent="  "), *reasons])


def faster_option(results: Sequence[tuple[KernelCase, Outcome]]) -> str:
    """Return the option that serves with a faster attention than the default, and what it gains; or
    nothing.

    Compared is the last pass of each kind of layer, one after another: canvases after 3,000 tokens.
    """
    times: dict[str, list[float]] = {}
    for case, outcome in results:
        if case.kernel == "attention" and outcome.microseconds is not None:
            times.setdefault(case.impl, []).append(outcome.microseconds)
    default = times.pop("triton", [])
    for impl, others in times.items():
        # Only if it was timed for every kind of layer.
        if default and len(others) == len(default) and sum(others) <= (1 - GAIN) * sum(default):
            gain = 1 - sum(others) / sum(default)
            return f"Attention takes {gain:.0%} less time with {attention_option(impl)}"
    return ""


def without_names(text: str) -> str:
    """Leave out this machine's name, and of each path all but the file's name."""
    text = re.sub(r"(?<![\w.])~?(?:/[\w.+@-]+)+/([\w.+-]+)", r"\1", text)
    return text.replace(socket.gethostname(), "this machine")
