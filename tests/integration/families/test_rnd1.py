"""RND1: the engine's tokens are those of its published loop, in any batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine
from tests.support.families import makers as tiny
from tests.support.families import rnd1, run
from tests.support.families.model import MASK_ID, TinyModel, prompt_of
from tests.support.families.run import Run
from vllm_diffusion.metrics import ANSWER

pytestmark = pytest.mark.engine

MAX_LENGTH = 192


@functools.cache
def model() -> TinyModel:
    return tiny.rnd1()


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TracedEngine]:
    folder = model().save(tmp_path_factory.mktemp("rnd1"))
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8}
    with TracedEngine(folder, async_scheduling=request.param, **options) as made:
        yield made


def asked(
    length: int, max_tokens: int, seed: int, steps: int | None = None, **common: Any
) -> tuple[list[int], Any, Run]:
    """Return a prompt, the settings of its request, and the loop's run."""
    from vllm import SamplingParams

    prompt = prompt_of(length, seed=seed)
    common = {"temperature": 0.0} | common
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=True,
        detokenize=False,
        extra_args={} if steps is None else {"diffusion_max_steps": steps},
        **common,
    )
    loop = rnd1.generate(
        run.suppress(model(), [MASK_ID]),
        prompt,
        # The padding token after an answer is one of the loop's, and none of the request's.
        max_new_tokens=min(max_tokens + 1, MAX_LENGTH - length),
        num_steps=steps or 256,
        mask_id=MASK_ID,
        pad_id=model().config["pad_token_id"],
        sample=run.keyed_sample(seed),
        **common,
    )
    return prompt, params, loop


BATCHES: dict[str, list[dict[str, Any]]] = {
    # The last one leaves no room for the padding token, and is a token shorter.
    "lengths": [
        {"length": n, "max_tokens": m, "temperature": t}
        for n, m, t in ((1, 5, 0.01), (2, 31, 0.0), (33, 40, 1.0), (150, 42, 0.5))
    ],
    # Fewer steps than tokens, as many, and more, most of which would reveal nothing.
    "steps": [
        {"length": 20, "max_tokens": 24, "steps": n, "temperature": t}
        for n in (1, 5, 7, 24, 25, 256)
        for t in (0.0, 0.7)
    ],
    "filters": [
        {"length": 12 + i, "max_tokens": 30, "steps": 12, "temperature": t, **filters}
        for i, filters in enumerate(({"top_p": 0.9}, {"top_k": 5}, {"top_k": 4, "top_p": 0.8}))
        for t in (0.2, 1.0)
    ],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens(engine: TracedEngine, batch: str) -> None:
    """Requests of several lengths and settings get in one batch the tokens that each gets alone."""
    requests = [asked(seed=7 + i, **wanted) for i, wanted in enumerate(BATCHES[batch])]
    outputs = engine.outputs([r[0] for r in requests], [r[1] for r in requests])
    for wanted, (_, _, loop), output in zip(BATCHES[batch], requests, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == loop.tokens, wanted
    assert len({tuple(loop.tokens) for _, _, loop in requests}) > 1


@pytest.mark.parametrize("steps", [1, 7, 24, 256])
def test_passes(engine: TracedEngine, steps: int) -> None:
    """A request takes one pass per step that reveals something, and reports that number."""
    from vllm_diffusion.metrics import request_metrics

    prompt, params, loop = asked(20, 24, 3, steps, temperature=1.0)
    params.extra_args = {**params.extra_args, "diffusion_step_map": True}
    (output,) = engine.outputs([prompt], [params])
    completion = output.outputs[0]
    metrics = request_metrics(completion)
    assert metrics is not None
    assert list(metrics.denoise_steps_per_canvas) == [len(loop.passes)]
    assert list(completion.diffusion_step_map) == [step + 1 for step in loop.revealed]


def test_the_padding_token_is_attended(engine: TracedEngine) -> None:
    """With another token after the answer, the loop writes other tokens."""
    prompt, _, loop = asked(20, 24, 3, 24, temperature=1.0)
    other = rnd1.generate(
        run.suppress(model(), [MASK_ID]),
        prompt,
        max_new_tokens=25,
        num_steps=24,
        temperature=1.0,
        mask_id=MASK_ID,
        pad_id=50,
        sample=run.keyed_sample(3),
    )
    assert other.tokens != loop.tokens


def test_shared_parameters(engine: TracedEngine) -> None:
    """A long prompt, whose answer is cut to its room, cuts none that shares its parameters."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt_of(length)} for length in (185, 8)]
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 20]


@pytest.mark.parametrize("length", [20, 160])
def test_a_suffix(engine: TracedEngine, length: int) -> None:
    """A suffix stands between the answer and the padding, and is cut to the room that is left."""
    suffix = ", then home" * 4
    ids = engine.llm.get_tokenizer().encode(suffix, add_special_tokens=False)
    prompt, params, free = asked(length, 24, 3, 24)
    params.extra_args = {**params.extra_args, "diffusion_suffix": suffix}
    loop = rnd1.generate(
        run.suppress(model(), [MASK_ID]),
        prompt,
        max_new_tokens=25,
        num_steps=24,
        mask_id=MASK_ID,
        pad_id=model().config["pad_token_id"],
        suffix_ids=ids[: MAX_LENGTH - length - 25],
    )
    (output,) = engine.outputs([prompt], [params])
    assert list(output.outputs[0].token_ids) == loop.tokens != free.tokens
    assert getattr(output.outputs[0], ANSWER).num_suffix == min(len(ids), MAX_LENGTH - length - 25)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"length": MAX_LENGTH - 1},
            "has 191 tokens; an answer of at least one token and 1 after it",
        ),
        ({"extra_args": {"eb_gamma": 0.1}}, "eb_gamma is not served"),
        ({"extra_args": {"add_eos_at_end": True}}, "add_eos_at_end is not served"),
        ({"extra_args": {"num_diffusion_steps": 8}}, "diffusion_max_steps"),
        ({"bad_words": ["a"]}, "bad_words is not supported by this model"),
    ],
)
def test_refused(engine: TracedEngine, changes: dict[str, Any], says: str) -> None:
    """What the published loop has and a request cannot get is refused by name."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    others = {name: value for name, value in changes.items() if name != "length"}
    prompt = prompt_of(changes.get("length", 8))
    with pytest.raises(VLLMValidationError, match=says):
        engine.outputs([prompt], [SamplingParams(max_tokens=4, **others)])
