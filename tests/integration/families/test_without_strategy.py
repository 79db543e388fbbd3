"""Dream, CoDA and RND1: the engine's tokens are those of their published loops, in any batch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine, tokens_of
from tests.support.families import run
from tests.support.families.cases import WITHOUT_STRATEGY, Case, Wanted, assert_loops, expected
from tests.support.families.model import TinyModel, prompt_of
from tests.support.families.run import Run
from vllm_diffusion.metrics import ANSWER

pytestmark = pytest.mark.engine

MAX_LENGTH = 192


class Family:
    """A family's tiny model, and the engine that serves it."""

    def __init__(self, name: str, model: TinyModel, engine: TracedEngine) -> None:
        self.name, self.case, self.model, self.engine = name, WITHOUT_STRATEGY[name], model, engine

    def wanted(self, **settings: Any) -> Wanted:
        """Return what a request sets, without the algorithms of Dream and CoDA for RND1."""
        others = ("algorithm", "alg_temp") if self.name == "rnd1" else ()
        return self.case.wanted(**{k: v for k, v in settings.items() if k not in others})

    def loop(self, prompt: list[int], wanted: Wanted, **changes: Any) -> Run:
        """Return the published loop's run, with other arguments than its own if there are any."""
        case: Case = replace(self.case, loop=partial(self.case.loop, **changes))
        return expected(case, self.model, prompt, wanted)


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def is_asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=WITHOUT_STRATEGY)
def family(
    request: pytest.FixtureRequest,
    is_asynchronous: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Family]:
    model = WITHOUT_STRATEGY[request.param].make()
    folder = model.save(tmp_path_factory.mktemp(request.param))
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8}
    with TracedEngine(folder, async_scheduling=is_asynchronous, **options) as engine:
        yield Family(request.param, model, engine)


rnd1 = pytest.mark.parametrize("family", ["rnd1"], indirect=True)
STEPS = (1, 5, 7, 24, 25, 60, 256, 512)
FILTERS = ({"top_p": 0.9}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8})
ALGORITHMS = ("entropy", "maskgit_plus", "topk_margin", "origin")
# Lengths of prompts, each with what its request sets.
BATCHES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    # The last one leaves no room for RND1's padding token, and is a token shorter there.
    "lengths": [
        # Where all tokens are nearly certain, an entropy of Dream's is a rounding error.
        (1, {"max_tokens": 5, "temperature": 0.01, "algorithm": "origin"}),
        *(
            (length, {"max_tokens": n, "temperature": t})
            for length, n, t in ((2, 31, 0.0), (33, 40, 0.0), (33, 40, 1.0), (150, 42, 0.5))
        ),
    ],
    # Fewer steps than tokens, as many, and more, most of which would reveal nothing.
    "steps": [
        (20, {"max_tokens": 24, "steps": n, "temperature": t}) for n in STEPS for t in (0.0, 0.7)
    ],
    "filters": [
        (12 + i, {"max_tokens": 30, "steps": 12, "temperature": t, **filters})
        for i, filters in enumerate(FILTERS)
        for t in (0.2, 1.0)
    ],
    "algorithms": [
        (9 + i, {"max_tokens": 30, "steps": 20, "algorithm": algorithm, "temperature": t})
        for i, algorithm in enumerate(ALGORITHMS)
        for t in (0.0, 0.8)
    ],
    "filters of each algorithm": [
        (12, {"max_tokens": 20, "steps": 10, "algorithm": algorithm, **filters})
        for algorithm in ALGORITHMS
        for filters in (
            {"temperature": 0.2, "top_p": 0.95},
            {"temperature": 1.0, "top_k": 5, "top_p": 0.8},
        )
    ],
    # The token is the likeliest one all the same; where it is revealed depends on the kept tokens.
    "filters at temperature 0": [
        (9 + 26 * i, {"max_tokens": 40, "steps": 20, "algorithm": algorithm, **filters})
        for i, filters in enumerate(FILTERS)
        for algorithm in ALGORITHMS
    ],
    "alg_temp": [
        (12, {"max_tokens": 20, "steps": 10, "algorithm": algorithm, "alg_temp": heat})
        for algorithm in ALGORITHMS[:3]
        for heat in (0.0, 0.1, 1.0)
    ],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens(family: Family, batch: str) -> None:
    """Requests of several lengths and settings get in one batch the tokens that each gets alone."""
    requests = BATCHES[batch]
    prompts = [prompt_of(length, seed=7 + i) for i, (length, _) in enumerate(requests)]
    wanted = [family.wanted(seed=7 + i, **settings) for i, (_, settings) in enumerate(requests)]
    outputs = family.engine.outputs(prompts, [one.sampling_params() for one in wanted])
    answers = tokens_of(outputs)
    assert_loops(family.case, family.model, prompts, wanted, answers)
    assert len(set(map(tuple, answers))) > 1


@pytest.mark.parametrize("steps", [1, 6, 7, 24, 128, 256])
def test_passes(family: Family, steps: int) -> None:
    """A request takes one pass per step that reveals something, and reports that number."""
    from vllm_diffusion.metrics import request_metrics

    prompt = prompt_of(20, seed=3)
    wanted = family.wanted(
        max_tokens=24, seed=3, steps=steps, temperature=float(family.name == "rnd1")
    )
    params = wanted.sampling_params({"diffusion_step_map": True})
    (output,) = family.engine.outputs([prompt], [params])
    completion, loop = output.outputs[0], family.loop(prompt, wanted)
    metrics = request_metrics(completion)
    assert metrics is not None
    assert list(metrics.denoise_steps_per_canvas) == [len(loop.passes)]
    assert list(completion.diffusion_step_map) == [step + 1 for step in loop.revealed]


def test_an_end_token_ends_the_answer(family: Family) -> None:
    """The first end token of the finished answer ends it, and changes no token before it."""
    prompt, wanted = prompt_of(8, seed=5), family.wanted(max_tokens=24, seed=5)
    tokens = family.loop(prompt, wanted).tokens
    params = wanted.sampling_params(stop_token_ids=[tokens[10]])
    params.update_from_generation_config({}, None)
    (output,) = family.engine.outputs([prompt], [params])
    assert list(output.outputs[0].token_ids) == run.cut(tokens, [tokens[10]])


@rnd1
def test_the_padding_token_is_attended(family: Family) -> None:
    """With another token after the answer, the loop writes other tokens."""
    request = prompt_of(20, seed=3), family.wanted(max_tokens=24, seed=3, steps=24, temperature=1.0)
    assert family.loop(*request, pad_id=50).tokens != family.loop(*request).tokens


@rnd1
def test_shared_parameters(family: Family) -> None:
    """A long prompt, whose answer is cut to its room, cuts none that shares its parameters."""
    params = family.wanted(max_tokens=20).sampling_params()
    outputs = family.engine.outputs([prompt_of(length) for length in (185, 8)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 20]


@rnd1
@pytest.mark.parametrize("length", [20, 160])
def test_a_suffix(family: Family, length: int) -> None:
    """A suffix stands between the answer and the padding, and is cut to the room that is left."""
    suffix = ", then home" * 4
    ids = family.engine.llm.get_tokenizer().encode(suffix, add_special_tokens=False)
    prompt, wanted = prompt_of(length, seed=3), family.wanted(max_tokens=24, seed=3, steps=24)
    loop = family.loop(prompt, wanted, suffix_ids=ids[: MAX_LENGTH - length - 25])
    params = wanted.sampling_params({"diffusion_suffix": suffix})
    (output,) = family.engine.outputs([prompt], [params])
    assert list(output.outputs[0].token_ids) == loop.tokens != family.loop(prompt, wanted).tokens
    assert getattr(output.outputs[0], ANSWER).num_suffix == min(len(ids), MAX_LENGTH - length - 25)


@rnd1
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
def test_refused(family: Family, changes: dict[str, Any], says: str) -> None:
    """What the published loop has and a request cannot get is refused by name."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    others = {name: value for name, value in changes.items() if name != "length"}
    prompt = prompt_of(changes.get("length", 8))
    with pytest.raises(VLLMValidationError, match=says):
        family.engine.outputs([prompt], [SamplingParams(max_tokens=4, **others)])
