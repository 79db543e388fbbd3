"""Every masked family: the engine's tokens are those of its published loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import TracedEngine
from tests.support.families.cases import CASES, Case, Wanted, expected
from tests.support.families.model import TinyModel, prompt_of

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


class Family:
    """A family's tiny model, and the engine that serves it."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.case: Case = CASES[name]
        self.model: TinyModel = self.case.make()
        self.block_length = self.model.block_length
        options = OPTIONS | self.case.options | options
        self.engine = TracedEngine(self.model.save(folder), **options)

    def generate(self, prompts: list[list[int]], wanted: list[Wanted], **changes: Any) -> list[Any]:
        """Token ids of each prompt's answer, all in one batch."""
        outputs = self.engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [one.sampling_params(**changes) for one in wanted],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def check(self, prompts: list[list[int]], wanted: list[Wanted]) -> None:
        """The answers, in one batch, are the loop's."""
        answers = self.generate(prompts, wanted)
        for prompt, one, answer in zip(prompts, wanted, answers, strict=True):
            loop = expected(self.case, self.model, prompt, one)
            assert answer == loop.tokens, (len(prompt), one)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def is_asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=CASES)
def family(
    request: pytest.FixtureRequest,
    is_asynchronous: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("family")
    served = Family(request.param, folder, async_scheduling=is_asynchronous)
    yield served
    served.engine.close()


def test_prompts_of_every_length(family: Family) -> None:
    """Within the first block, at its border, beyond it, many blocks: all in one batch."""
    B = family.block_length
    lengths = sorted({1, 2, B - 1, B, B + 1, 2 * B, 63, 150})
    prompts = [prompt_of(length, seed=length) for length in lengths]
    family.check(prompts, [Wanted(max_tokens=2 * B + 3)] * len(prompts))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.95])
def test_thresholds(family: Family, threshold: float) -> None:
    """That reveal all at once, a few, and one a step."""
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 70)]
    wanted = Wanted(max_tokens=family.block_length + 5, threshold=threshold)
    family.check(prompts, [wanted] * len(prompts))


def test_strategies_and_steps(family: Family) -> None:
    """Each that the loop has, with fewer steps than positions too."""
    strategies: list[tuple[str, int | None]] = [(s, None) for s in family.case.strategies]
    strategies += [(s, n) for s in family.case.stepped for n in (2, 3)]
    prompts = [prompt_of(40 + i, seed=i) for i in range(len(strategies))]
    # Whole blocks only: a first one of fewer masks has steps to spare.
    prompts = [
        prompt[: len(prompt) // family.block_length * family.block_length] for prompt in prompts
    ]
    B = family.block_length
    wanted = [Wanted(2 * B, threshold=0.9, strategy=s, steps=n) for s, n in strategies]
    family.check(prompts, wanted)


def test_temperature_and_filters(family: Family) -> None:
    """With this package's noise in the loop's place, the same draws."""
    wanted = [Wanted(temperature=0.7, seed=5), Wanted(temperature=1.3, seed=6)]
    if "top_k" in family.case.filters:
        wanted.append(Wanted(temperature=1.0, top_k=5, seed=7))
        wanted.append(Wanted(temperature=0.8, top_k=20, top_p=0.9, seed=9, threshold=0.6))
    if "top_p" in family.case.filters:
        wanted.append(Wanted(temperature=1.0, top_p=0.8, seed=8))
    prompts = [prompt_of(9 + 7 * i, seed=i) for i in range(len(wanted))]
    family.check(prompts, wanted)
