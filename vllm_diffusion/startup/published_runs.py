"""What publishers of families sample with, and what a server logs where a checkpoint differs."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_diffusion.decoding.canvas_spec import CanvasSpec
    from vllm_diffusion.startup.plugin_settings import PluginSettings


logger = logging.getLogger("vllm.vllm_diffusion")

# vLLM's defaults, which apply if neither a request nor the checkpoint sets a value.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class PublishedRun:
    """Settings with which a publisher samples in one place.

    Attributes:
        family: Name of the family for users.
        kind: ``"function"``, ``"example"``, ``"evaluation"`` or ``"checkpoint"``.
        sampling: Sampling parameters of vLLM that differ from its neutral ones.
        source: Repository, commit and file of the settings.
        architectures: Architectures of the family's checkpoints; only its first run names them.
        rule: Decoding rule that implements it; ``None`` for the family's default.
        settings: Settings of that rule.
        block_length: Positions of a block, if it is not the checkpoint's.
    """

    family: str
    kind: str
    sampling: Mapping[str, float]
    source: str
    architectures: tuple[str, ...] = ()
    rule: str | None = None
    settings: Mapping[str, float | str] = field(default_factory=dict)
    block_length: int | None = None


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Read all published runs, in the order of ``families/published.toml``."""
    text = files("vllm_diffusion.families").joinpath("published.toml").read_text(encoding="utf-8")
    return tuple(PublishedRun(**run) for run in tomllib.loads(text)["run"])


def published_loop(architecture: str, rule: str) -> PublishedRun | None:
    """Return the published function that a rule of an architecture implements, if there is one."""
    for run in published_runs():
        is_loop = run.kind == "function" and architecture in run.architectures
        if is_loop and run.rule in (None, rule):
            return run
    return None


def sampling_changes(
    served: Mapping[str, float], wanted: Mapping[str, float], judges_filtered: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the sampling parameters that differ, each with the served value and the wanted one.

    Args:
        served: Default values of requests; those left out are vLLM's neutral ones.
        wanted: Values of a published run, likewise.
        judges_filtered: True if the rule judges by filters at temperature 0 too, where others have
            no use for them.
    """
    served, wanted = NEUTRAL | dict(served), NEUTRAL | dict(wanted)
    if wanted["temperature"] == 0 and not judges_filtered:
        wanted |= {name: served[name] for name in ("top_k", "top_p", "min_p")}
    return {name: (served[name], wanted[name]) for name in NEUTRAL if served[name] != wanted[name]}


def log_differences(
    model_config: ModelConfig, chosen: PluginSettings, spec: CanvasSpec, rule: str
) -> None:
    """Log in one line where requests that set nothing differ from the published loop.

    Settings of the operator are not mentioned.
    """
    run = published_loop(model_config.architecture, rule)
    if run is None:
        return
    changes = sampling_changes(
        model_config.get_diff_sampling_param(),
        run.sampling,
        spec.ways[0].rule.judges_filtered,
    )
    changes = {
        name: values
        for name, values in changes.items()
        if name not in model_config.override_generation_config
    }
    of_rule = {
        name: (spec.settings[name], value)
        for name, value in run.settings.items()
        if spec.settings[name] != value and name not in chosen.of_rule and chosen.preset is None
    }
    if not changes and not of_rule:
        return
    options = []
    if changes:
        options.append("--generation-config vllm")
        if overrides := {k: v for k, v in run.sampling.items() if NEUTRAL[k] != v}:
            options.append(f"--override-generation-config '{json.dumps(overrides)}'")
    if of_rule:
        wanted = {name: there for name, (_, there) in of_rule.items()}
        options.append(f"--additional-config '{json.dumps({'diffusion': wanted})}'")
    listed = [f"{name}={here!r} ({there!r})" for name, (here, there) in (changes | of_rule).items()]
    logger.info(
        "A request that sets nothing gets %s, in brackets what the published loop of %s has; %s gives "
        "the loop's.",
        ", ".join(listed),
        run.family,
        " ".join(options),
    )


def warn_of_one_a_pass(chosen: PluginSettings, spec: CanvasSpec) -> None:
    """Warn where the checkpoint's own settings decide one token a pass, with those that decide
    more.
    """
    length = spec.block_length({})
    faster = spec.ways[0].rule.faster(spec.settings, spec.max_denoising_steps, length)
    if not faster or faster.keys() & chosen.of_rule.keys():
        return
    logger.warning(
        "The checkpoint's own %s, with a step for each of a canvas's %d positions, decides one token a "
        "pass; --additional-config '%s' decides as many as the model is certain of.",
        " and ".join(f"{name}={spec.settings[name]!r}" for name in faster),
        length,
        json.dumps({"diffusion": faster}),
    )
