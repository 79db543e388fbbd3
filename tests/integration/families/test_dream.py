"""Dream and CoDA: the engine's tokens are those of their published loop, in any batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine
from tests.support.families import dream, run
from tests.support.families.cases import IN_TIME
from tests.support.families.model import MASK_ID, TinyModel, prompt_of
from tests.support.families.run import Run

pytestmark = pytest.mark.engine

MAX_LENGTH = 192


@functools.cache
def model(family: str) -> TinyModel:
    return IN_TIME[family]()


@pytest.fixture(scope="module", params=IN_TIME)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, family: str
) -> Iterator[TracedEngine]:
    folder = model(family).save(tmp_path_factory.mktemp(family))
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8}
    options["async_scheduling"] = request.param
    with TracedEngine(folder, **options) as made:
        yield made


# What a request gets that sets neither; the loop's own defaults are ``origin`` and 512.
DEFAULTS: dict[str, dict[str, Any]] = {
    "dream": {"steps": 512, "alg_temp": 0.0},
    "coda": {"steps": 128, "alg_temp": 0.1},
}


def asked(family: str, **wanted: Any) -> tuple[list[int], Any, Run]:
    """Return a prompt, the settings of its request, and the loop's run."""
    from vllm import SamplingParams

    prompt = prompt_of(wanted.pop("length"), seed=wanted["seed"])
    common = {name: wanted[name] for name in ("temperature", "top_k", "top_p") if name in wanted}
    arguments = {
        f"diffusion_{name}": wanted[own]
        for name, own in (("algorithm", "alg"), ("alg_temp", "alg_temp"), ("max_steps", "steps"))
        if own in wanted
    }
    params = SamplingParams(
        max_tokens=wanted["max_tokens"],
        seed=wanted["seed"],
        ignore_eos=True,
        detokenize=False,
        extra_args=arguments,
        **({"temperature": 0.0} | common),
    )
    loop = dream.generate(
        run.suppress(model(family), [MASK_ID]),
        prompt,
        max_new_tokens=wanted["max_tokens"],
        steps=wanted.get("steps", DEFAULTS[family]["steps"]),
        alg=wanted.get("alg", "entropy"),
        alg_temp=wanted.get("alg_temp", DEFAULTS[family]["alg_temp"]),
        mask_id=MASK_ID,
        sample=run.keyed_sample(wanted["seed"]),
        uniform=run.keyed_uniform(wanted["seed"]),
        **common,
    )
    return prompt, params, loop


BATCHES = {
    "lengths": [{"length": n, "max_tokens": m} for n, m in ((1, 5), (2, 31), (33, 40), (150, 42))],
    # Fewer steps than tokens, as many, and more, most of which would reveal nothing.
    "steps": [{"length": 20, "max_tokens": 24, "steps": n} for n in (1, 5, 24, 25, 60, 512)],
    "algorithms": [
        {"length": 9 + i, "max_tokens": 30, "steps": 20, "alg": alg, "temperature": t}
        for i, (alg, t) in enumerate(
            (a, t) for a in ("origin", "maskgit_plus", "topk_margin", "entropy") for t in (0.0, 0.8)
        )
    ],
    "filters": [
        {"length": 12, "max_tokens": 20, "steps": 10, "alg": alg, **filters}
        for alg in ("entropy", "maskgit_plus", "topk_margin", "origin")
        for filters in (
            {"temperature": 0.2, "top_p": 0.95},
            {"temperature": 1.0, "top_k": 5, "top_p": 0.8},
        )
    ],
    # The token is the likeliest one all the same; where it is revealed depends on the kept tokens.
    "filters at temperature 0": [
        {"length": 9 + 26 * i, "max_tokens": 40, "steps": 20, "alg": alg, **filters}
        for i, filters in enumerate(
            ({"top_p": 0.9}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8})
        )
        for alg in ("entropy", "maskgit_plus", "topk_margin", "origin")
    ],
    "alg_temp": [
        {"length": 12, "max_tokens": 20, "steps": 10, "alg": alg, "alg_temp": heat}
        for alg in ("entropy", "maskgit_plus", "topk_margin")
        for heat in (0.0, 0.1, 1.0)
    ],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens(engine: TracedEngine, family: str, batch: str) -> None:
    """Requests of several lengths and settings get in one batch the tokens that each gets alone."""
    requests = [asked(family, seed=7 + i, **wanted) for i, wanted in enumerate(BATCHES[batch])]
    outputs = engine.outputs([r[0] for r in requests], [r[1] for r in requests])
    for wanted, (_, _, loop), output in zip(BATCHES[batch], requests, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == loop.tokens, wanted
    assert len({tuple(loop.tokens) for _, _, loop in requests}) > 1


@pytest.mark.parametrize("steps", [1, 6, 24, 128])
def test_passes(engine: TracedEngine, family: str, steps: int) -> None:
    """A request takes one pass per step that reveals something, and reports that number."""
    from vllm_diffusion.metrics import request_metrics

    prompt, params, loop = asked(family, length=20, max_tokens=24, steps=steps, seed=3)
    params.extra_args = {**params.extra_args, "diffusion_step_map": True}
    (output,) = engine.outputs([prompt], [params])
    completion = output.outputs[0]
    metrics = request_metrics(completion)
    assert metrics is not None
    assert list(metrics.denoise_steps_per_canvas) == [len(loop.passes)]
    assert list(completion.diffusion_step_map) == [step + 1 for step in loop.revealed]


def test_an_end_token_ends_the_answer(engine: TracedEngine, family: str) -> None:
    """The first end token of the finished answer ends it, and changes no token before it."""
    prompt, params, loop = asked(family, length=8, max_tokens=24, seed=5)
    end = loop.tokens[10]
    params.stop_token_ids = [end]
    params.update_from_generation_config({}, None)
    (output,) = engine.outputs([prompt], [params])
    assert list(output.outputs[0].token_ids) == run.cut(loop.tokens, [end])
