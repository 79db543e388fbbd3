"""Every masked family, as the parity tests use it.

A new one is a line in ``CASES``, or in ``WITHOUT_STRATEGY`` if its requests have no strategy.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.families import (
    bd3lm,
    dream,
    dream_reasoner,
    fast_dllm,
    llada,
    llada2,
    mineru,
    nemotron,
    rnd1,
    run,
    sdar,
    stable_diffcoder,
)
from tests.support.families import makers as tiny
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID
from tests.support.families.llada2_model import llada2 as tiny_llada2
from tests.support.families.llada2_model import llada2_2 as tiny_llada2_2
from tests.support.families.mineru_model import mineru as tiny_mineru
from tests.support.families.model import MASK_ID, TinyModel
from tests.support.families.run import Run
from tests.support.models.checkpoints import random_checkpoint

STRATEGIES = {
    "dynamic": "low_confidence_dynamic",
    "static": "low_confidence_static",
    "sequential": "sequential",
    "entropy": "entropy",
    "entropy_budget": "entropy_budget",
}


@dataclass(frozen=True)
class Wanted:
    """What a request sets.

    Attributes:
        max_tokens: Tokens.
        threshold: ``diffusion_reveal_threshold``; ``None`` for a family without strategies.
        strategy: ``diffusion_strategy``; ``None`` for a family without strategies.
        algorithm: ``diffusion_algorithm``, of Dream and CoDA; ``None`` for their own.
        alg_temp: ``diffusion_alg_temp``, of Dream and CoDA; ``None`` for their own.
        entropy_budget: ``diffusion_entropy_budget``; ``None`` for the rule's own.
        steps: ``diffusion_max_steps``; ``None`` for the family's own number.
        editing_threshold: ``diffusion_editing_threshold``, of LLaDA2.1 and 2.2.
        max_post_steps: ``diffusion_max_post_steps``, of LLaDA2.1 and 2.2.
        temperature: 0 takes the likeliest token.
        top_k: 0 for all.
        top_p: 1.0 for all.
        seed: Of the draws.
    """

    max_tokens: int = 20
    threshold: float | None = 0.3
    strategy: str | None = "dynamic"
    algorithm: str | None = None
    alg_temp: float | None = None
    entropy_budget: float | None = None
    steps: int | None = None
    editing_threshold: float | None = None
    max_post_steps: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def extra_args(self) -> dict[str, Any]:
        """What is not vLLM's, under the names of requests."""
        named = {
            "diffusion_reveal_threshold": self.threshold,
            "diffusion_strategy": self.strategy,
            "diffusion_algorithm": self.algorithm,
            "diffusion_alg_temp": self.alg_temp,
            "diffusion_entropy_budget": self.entropy_budget,
            "diffusion_max_steps": self.steps,
            "diffusion_editing_threshold": self.editing_threshold,
            "diffusion_max_post_steps": self.max_post_steps,
        }
        return {name: value for name, value in named.items() if value is not None}

    def sampling_params(self, shown: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        """vLLM's, which end at nothing but ``max_tokens``.

        Args:
            shown: Arguments that set what is sent besides tokens.
            changes: Of any parameter.
        """
        from vllm import SamplingParams

        extra = self.extra_args() | dict(shown or {})
        return SamplingParams(**(self.plain() | {"extra_args": extra} | changes))

    def plain(self) -> dict[str, Any]:
        """``sampling_params`` for an engine in another process."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "ignore_eos": True,
            "detokenize": False,
            "extra_args": self.extra_args(),
        }


@dataclass(frozen=True)
class Asked:
    """What a published loop is given.

    Attributes:
        model: The family's, which cannot draw a mask.
        prompt: Token ids.
        wanted: Of at least ``max_tokens`` tokens.
        ends: End tokens.
    """

    model: TinyModel
    prompt: Sequence[int]
    wanted: Wanted
    ends: Sequence[int]

    @property
    def block_length(self) -> int:
        return self.model.block_length

    @property
    def end(self) -> int:
        """The loop's one end token; an impossible one where it is to have none."""
        return self.ends[0] if self.ends else -1

    @property
    def whole_blocks(self) -> int:
        """At least as many tokens as wanted, up to the end of a block."""
        end = len(self.prompt) + self.wanted.max_tokens
        return -(-end // self.block_length) * self.block_length - len(self.prompt)

    @property
    def common(self) -> dict[str, Any]:
        """Arguments that every loop has under these names."""
        return {
            "model": run.suppress(self.model, [MASK_ID]),
            "prompt_ids": self.prompt,
            "temperature": self.wanted.temperature,
            "mask_id": MASK_ID,
            "sample": run.keyed_sample(self.wanted.seed),
        }

    @property
    def filtered(self) -> dict[str, Any]:
        """``common``, and the filters."""
        return self.common | {"top_k": self.wanted.top_k, "top_p": self.wanted.top_p}

    @property
    def llada2(self) -> dict[str, Any]:
        """``filtered``, and those of all of LLaDA2's."""
        return self.filtered | {
            "block_length": self.block_length,
            "threshold": self.wanted.threshold,
            "gen_length": self.whole_blocks,
        }


Loop = Callable[[Asked], Run]


_ALL = tuple(STRATEGIES)


@dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
        make: Its tiny model, given a seed.
        loop: Its published loop.
        strategies: Those that its loop has.
        filters: Of top-k and top-p those that its loop knows.
        stepped: Strategies that its loop has with fewer steps than positions.
        options: Of the engine.
        wanted: What a request sets.
    """

    make: Callable[..., TinyModel]
    loop: Loop
    strategies: tuple[str, ...] = _ALL
    filters: tuple[str, ...] = ("top_k", "top_p")
    stepped: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    wanted: Callable[..., Wanted] = Wanted

    @property
    def words(self) -> list[str]:
        """The options as words of ``vllm serve``."""
        return [
            word
            for option, value in self.options.items()
            for word in ("--" + option.replace("_", "-"), json.dumps(value))
        ]


def _sdar(asked: Asked, generate: Callable[..., Run] = sdar.generate) -> Run:
    wanted = asked.wanted
    # MinerU-Diffusion's has no end tokens.
    ends = {} if generate is mineru.generate else {"stopping_criteria_idx": asked.ends}
    return generate(
        **asked.filtered,
        block_length=asked.block_length,
        gen_length=wanted.max_tokens,
        denoising_steps=wanted.steps or asked.block_length,
        remasking_strategy=STRATEGIES[wanted.strategy],
        confidence_threshold=wanted.threshold,
        entropy_budget=0.1 if wanted.entropy_budget is None else wanted.entropy_budget,
        **ends,
    )


def _llada2_0(asked: Asked) -> Run:
    # No fewer than a block's: the loop takes no more steps than tokens.
    length = asked.whole_blocks + asked.block_length
    return llada2.generate_2_0(
        **asked.llada2 | {"gen_length": length},
        steps=asked.wanted.steps or asked.block_length,
        eos_id=asked.end,
    )


def _editing(wanted: Wanted, editing_threshold: float) -> dict[str, Any]:
    """What LLaDA2.1's and 2.2's loops share; they differ in one published default."""
    if wanted.editing_threshold is not None:
        editing_threshold = wanted.editing_threshold
    return {
        "editing_threshold": editing_threshold,
        "max_post_steps": 16 if wanted.max_post_steps is None else wanted.max_post_steps,
    }


def _llada2_1(asked: Asked) -> Run:
    return llada2.generate_2_1(**asked.llada2, **_editing(asked.wanted, 0.9), eos_id=asked.end)


def _llada2_2(asked: Asked) -> Run:
    # One more, so that the last block that is wanted is committed too, where it has to be.
    length = asked.whole_blocks + asked.block_length
    return llada2.generate_2_2(
        **asked.llada2 | {"gen_length": length},
        **_editing(asked.wanted, 0.0),
        max_steps_per_block=asked.wanted.steps or 1000,
        eos_ids=asked.ends,
        delete_token_id=DELETE_ID,
        split_token_id=SPLIT_ID,
    )


def _nemotron(asked: Asked) -> Run:
    wanted, B = asked.wanted, asked.block_length
    return nemotron.generate(
        **asked.common,
        max_new_tokens=-(-wanted.max_tokens // B) * B,
        block_length=B,
        threshold=None if wanted.strategy == "static" else wanted.threshold,
        eos_token_id=asked.end,
    )


def _fast_dllm(asked: Asked) -> Run:
    wanted, B = asked.wanted, asked.block_length
    return fast_dllm.generate(
        **asked.common,
        max_new_tokens=-(-wanted.max_tokens // B) * B + B,
        threshold=wanted.threshold,
        block_size=B,
        stop_token=asked.end,
        top_p=wanted.top_p,
    )


def _stable_diffcoder(asked: Asked) -> Run:
    wanted, B = asked.wanted, asked.block_length
    # The loop's last block is as much shorter as the first one's given tokens are many.
    length = -(-wanted.max_tokens // B) * B + B
    return stable_diffcoder.generate_block(
        **asked.common,
        steps=(wanted.steps or B) * (length // B),
        gen_length=length,
        block_length=B,
        threshold=None if wanted.strategy == "static" else wanted.threshold,
        eos_id=asked.end,
    )


def _llada(
    asked: Asked, is_growing: bool = False, max_length: int | None = None, **changes: Any
) -> Run:
    wanted, B = asked.wanted, asked.block_length
    num_blocks, steps = -(-wanted.max_tokens // B), wanted.steps or B
    has_room = max_length is None or len(asked.prompt) + num_blocks * B <= max_length
    common = asked.common | {
        "gen_length": num_blocks * B if has_room else wanted.max_tokens,
        "block_length": B,
        "remasking": "random" if wanted.strategy == "random" else "low_confidence",
        "threshold": wanted.threshold if wanted.strategy == "dynamic" else None,
        "uniform": run.keyed_uniform(wanted.seed),
        **changes,
    }
    if is_growing:
        return llada.var_generate(**common, steps=steps)
    return llada.generate(**common, steps=steps * num_blocks)


def _bd3lm(asked: Asked) -> Run:
    wanted = asked.wanted
    return bd3lm.generate(
        **asked.common,
        max_new_tokens=wanted.max_tokens,
        block_size=asked.block_length,
        steps_per_block=wanted.steps or asked.block_length,
        threshold=None if wanted.strategy == "static" else wanted.threshold,
    )


def _mdlm(asked: Asked, is_shifted: bool = False) -> Run:
    model = asked.common["model"]

    def shifted(ids: Tensor, visible: Tensor) -> Tensor:
        logits: Tensor = model(ids, visible)
        return torch.cat([logits[:1], logits[:-1]])

    return _llada(
        asked,
        model=shifted if is_shifted else model,
        gen_length=asked.wanted.max_tokens,
        schedule=bd3lm.schedule,
    )


def _dream(asked: Asked, steps: int = 512, alg_temp: float = 0.0) -> Run:
    wanted = asked.wanted
    return dream.generate(
        **asked.filtered,
        max_new_tokens=wanted.max_tokens,
        steps=wanted.steps or steps,
        alg=wanted.algorithm or "entropy",
        alg_temp=alg_temp if wanted.alg_temp is None else wanted.alg_temp,
        uniform=run.keyed_uniform(wanted.seed),
    )


def _rnd1(asked: Asked, max_length: int = 192, **changes: Any) -> Run:
    # The padding token after an answer is one of the loop's, and none of the request's.
    most = min(asked.wanted.max_tokens + 1, max_length - len(asked.prompt))
    arguments = asked.filtered | {"max_new_tokens": most, "pad_id": 0}
    return rnd1.generate(**arguments | changes, num_steps=asked.wanted.steps or 256)


# A block's length is not part of these checkpoints; as many steps are the default.
_IN_BLOCKS: dict[str, Any] = {
    "additional_config": {"diffusion": {"block_length": 16, "max_denoising_steps": 16}}
}


_whole = partial(
    Case,
    strategies=("dynamic", "static", "random"),
    filters=(),
    stepped=("static", "random"),
    options=_IN_BLOCKS,
)


# A2D's MDLM, whose folder is a BD3LM's, by its architecture and rule.
def mdlm_case(make: Callable[..., TinyModel], architecture: str, *, is_shifted: bool) -> Case:
    """A2D's MDLM on one of its bodies.

    Args:
        make: Its tiny BD3LM.
        architecture: What an operator names it.
        is_shifted: Whether a position's token comes from the row before it.
    """
    own: dict[str, Any] = {"block_length": 16, "max_denoising_steps": 16}
    own |= {"rule": "shifted_reveal_in_blocks"} if is_shifted else {}
    return _whole(
        partial(make, block_length=16),
        partial(_mdlm, is_shifted=is_shifted),
        options={
            "additional_config": {"diffusion": own},
            "hf_overrides": {"architectures": [architecture]},
        },
    )


# LLaDA2.1's rule has to be asked for where the folder is named otherwise.
_EDITING: dict[str, Any] = {"additional_config": {"diffusion": {"rule": "reveal_and_edit"}}}

CASES: dict[str, Case] = {
    "sdar": Case(tiny.sdar, _sdar, stepped=_ALL),
    "sdar-block-32": Case(lambda **given: tiny.sdar(block_length=32, **given), _sdar, stepped=_ALL),
    "sdar-moe": Case(tiny.sdar_moe, _sdar, stepped=_ALL),
    "llada2.0": Case(tiny_llada2, _llada2_0, ("dynamic",), stepped=("dynamic",)),
    "llada2.1": Case(tiny_llada2, _llada2_1, ("dynamic",), options=_EDITING),
    # The first seed whose experts are never as good as equal, where rounding would choose.
    "llada2.2": Case(partial(tiny_llada2_2, seed=4), _llada2_2, ("dynamic",), stepped=("dynamic",)),
    "nemotron": Case(tiny.nemotron, _nemotron, ("dynamic", "static"), filters=()),
    "fast-dllm": Case(tiny.fast_dllm, _fast_dllm, ("dynamic",), filters=("top_p",)),
    "stable-diffcoder": Case(
        tiny.stable_diffcoder,
        _stable_diffcoder,
        ("dynamic", "static"),
        filters=(),
        stepped=("static",),
    ),
    "dream-reasoner": Case(
        tiny.dream_reasoner, partial(_sdar, generate=dream_reasoner.generate), stepped=_ALL
    ),
    "a2d": Case(tiny.a2d, _bd3lm, ("dynamic", "static"), filters=(), stepped=("static",)),
    "mdlm": mdlm_case(tiny.a2d, "A2DQwen3MDLM", is_shifted=False),
    "mineru": Case(tiny_mineru, partial(_sdar, generate=mineru.generate), stepped=_ALL),
    "llada": _whole(tiny.llada, _llada),
    "llada-moe": _whole(tiny.llada_moe, _llada),
    "illada": _whole(tiny.illada, partial(_llada, is_growing=True)),
}

# One for each way in which canvases lie, and the one whose rows are routed by block.
LAYOUTS = ("sdar", "sdar-block-32", "llada2.1", "llada2.2", "nemotron", "fast-dllm")


_free = partial(Case, wanted=partial(Wanted, strategy=None, threshold=None))

# Families whose requests have no strategy: they reveal by a schedule in time, or in even steps.
WITHOUT_STRATEGY: dict[str, Case] = {
    "dream": _free(tiny.dream, _dream),
    "coda": _free(tiny.coda, partial(_dream, steps=128, alg_temp=0.1)),
    "rnd1": _free(tiny.rnd1, _rnd1),
}
EVERY_CASE = CASES | WITHOUT_STRATEGY


def checkpoint_of(family: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the options of an engine that it needs.

    Args:
        family: Of :data:`EVERY_CASE`, ``"uno"`` or ``"uno_k2"``; any other name is
            DiffusionGemma's, whose canvases take few steps: what is kept of one is what it was
            denoised on.
        folder: For the checkpoint.
    """
    if family in EVERY_CASE:
        return EVERY_CASE[family].make().save(folder), dict(EVERY_CASE[family].options)
    if family in ("uno", "uno_k2"):
        model = getattr(tiny, family)()
        return model.save(folder), dict(model.options)
    return random_checkpoint(folder, generation_config={"max_denoising_steps": 6}), {}


def expected(
    case: Case, model: TinyModel, prompt: Sequence[int], wanted: Wanted, ends: Sequence[int] = ()
) -> Run:
    """The published loop's run, cut to what a request gets."""
    found = case.loop(Asked(model, prompt, wanted, ends))
    tokens = run.cut(found.tokens[: wanted.max_tokens], ends)
    return Run(tokens, found.passes, found.revealed[: len(tokens)], found.rewritten)


def assert_loops(
    case: Case,
    model: TinyModel,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Wanted],
    answers: Sequence[list[int]],
) -> None:
    """Compare each answer of a batch with what the published loop gives its request alone."""
    for prompt, one, answer in zip(prompts, wanted, answers, strict=True):
        assert answer == expected(case, model, prompt, one).tokens, (len(prompt), one)
