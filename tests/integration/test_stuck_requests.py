"""Every request ends: an impossible one with a reason, and a slow one after others."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vllm import TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.engine import ASYNCHRONOUS_OFTEN, TracedEngine
from tests.support.models.checkpoints import SHIPPED, random_checkpoint
from vllm_diffusion.scheduling.constrained_canvas import ConstrainedCanvas
from vllm_diffusion.scheduling.grammars import GuidedText

pytestmark = pytest.mark.engine

NUM_SLOTS = 4
# Steps a canvas.
CAP = 6
NUM_HONEST = 8

LEGAL: Sequence[Mapping[str, Any]] = ({"constraint": {}, "ignore_eos": True},)
HOSTILE: Sequence[Mapping[str, Any]] = (
    {"constraint": {"regex": "a{5}"}, "bad_words": ["a"]},
    {"constraint": {"grammar": 'root ::= "ab" rest\nrest ::= rest "a"'}},
    {"constraint": {"grammar": 'root ::= root "a"'}},
    {"constraint": {"regex": "([xyz]{3}-){40}"}},
    {"constraint": {"regex": "[A-Z]{64}"}, "temperature": 2.0, "repetition_penalty": 100.0},
    {"constraint": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 30}}},
    {"constraint": {"regex": "[0-9]{64}"}, "presence_penalty": -2.0, "bad_words": ["1", "2"]},
)


def constrained(engine: TracedEngine, constraint: Mapping[str, Any], **options: Any) -> Any:
    """Return parameters of a seeded request with few steps per canvas."""
    options = {"seed": 3, "max_tokens": 48, "extra_args": {"diffusion_max_steps": CAP}, **options}
    return engine.sampling_params(
        structured_outputs=StructuredOutputsParams(**constraint) if constraint else None, **options
    )


def add(engine: TracedEngine, name: str, params: Any) -> None:
    """Hand a request to the engine."""
    tokens = engine.llm.get_tokenizer().encode("What is 7+8?")
    engine.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)


def drain(engine: TracedEngine, most: int = 600) -> tuple[dict[str, Any], dict[str, int]]:
    """Run the engine empty; return each request's output and its last step."""
    core = engine.llm.llm_engine
    outputs, ended = {}, {}
    for step in range(most):
        if not core.has_unfinished_requests():
            return outputs, ended
        for output in core.step():
            if output.finished:
                outputs[output.request_id] = output.outputs[0]
                ended[output.request_id] = step
        if not engine.scheduler.running:
            # As the engine's process does: a thread that compiles a grammar has to have its turn.
            time.sleep(0.001)
    raise AssertionError(
        f"after {most} steps {core.get_num_unfinished_requests()} requests are unfinished"
    )


def answer_to(engine: TracedEngine, constraint: Mapping[str, Any], **options: Any) -> Any:
    """Return the answer to a request that is alone."""
    add(engine, "only", constrained(engine, constraint, **options))
    return drain(engine)[0]["only"]


def assert_stuck(answer: Any, field: str = "structured_outputs", finish: str = "error") -> None:
    """Check with which reason an answer ended."""
    assert answer.finish_reason == finish
    assert answer.stop_reason == f"{field} allows no token here"


def last_honest_answer(engine: TracedEngine, others: Sequence[Mapping[str, Any]]) -> int:
    """Queue honest requests after others, twice as many as run at once, and return the step of the
    last honest answer.
    """
    for i in range(16):
        options = dict(others[i % len(others)])
        constraint = options.pop("constraint")
        params = constrained(engine, constraint, seed=i, max_tokens=64, **options)
        add(engine, f"other {i}", params)
    for i in range(NUM_HONEST):
        add(engine, f"honest {i}", constrained(engine, {}, seed=i, ignore_eos=True))
    _, ended = drain(engine, most=20_000)
    return max(ended[f"honest {i}"] for i in range(NUM_HONEST))


@pytest.fixture(scope="module", params=ASYNCHRONOUS_OFTEN)
def engine(request):
    with TracedEngine(SHIPPED, async_scheduling=request.param, max_num_seqs=NUM_SLOTS) as engine:
        yield engine


# No text satisfies them, which a back end does not tell before the text is written.
EMPTY = {
    "a grammar that never begins": {"grammar": 'root ::= root "a"'},
    "a prefix, and then nothing": {"grammar": 'root ::= "ab" rest\nrest ::= rest "a"'},
}
REFUSED = {
    "a schema that is its own": {"json": {"$ref": "#"}},
    "an expression without a string": {"regex": r"[^\s\S]"},
    "an expression that ends in none": {"regex": r"ab[^\s\S]"},
}


@pytest.mark.parametrize("constraint", REFUSED.values(), ids=REFUSED.keys())
def test_empty_language_is_refused(engine, constraint):
    """A constraint that llguidance finds to be satisfied by no text is refused before a pass."""
    with pytest.raises(VLLMValidationError, match="satisf") as raised:
        add(engine, "refused", constrained(engine, constraint))
    assert raised.value.parameter == "structured_outputs"


@pytest.mark.parametrize("constraint", EMPTY.values(), ids=EMPTY.keys())
def test_empty_language(engine, constraint):
    """A request whose constraint allows nothing ends with the reason, and no other one does."""
    add(engine, "neighbour", constrained(engine, {}))
    add(engine, "stuck", constrained(engine, constraint))
    outputs, _ = drain(engine)
    assert_stuck(outputs["stuck"])
    assert not outputs["stuck"].token_ids
    assert outputs["neighbour"].token_ids == answer_to(engine, {}).token_ids


def test_dead_end_behind_an_answer(engine):
    """A dead end after answered canvases ends the answer there with the reason."""
    constraint = {"grammar": 'root ::= [ab]{40} rest\nrest ::= rest "a"'}
    stuck = answer_to(engine, constraint, max_tokens=96)
    assert_stuck(stuck, finish="length")
    assert len(stuck.token_ids) == 32
    assert set(stuck.text) <= set("ab")


def test_structured_outputs_that_do_not_end_are_counted(engine):
    """Exactly the answers that ``max_tokens`` cuts in mid-structure count as stuck."""
    endless = {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 40}}
    before = engine.scheduler._counters._totals[0].stuck_requests
    add(engine, "endless", constrained(engine, endless, max_tokens=40))
    add(engine, "whole", constrained(engine, {"regex": "[ab]{5}"}, max_tokens=40))
    add(engine, "free", constrained(engine, {}, max_tokens=8, ignore_eos=True))
    outputs, _ = drain(engine)
    assert outputs["endless"].finish_reason == outputs["free"].finish_reason == "length"
    assert outputs["whole"].finish_reason == "stop"
    assert engine.scheduler._counters._totals[0].stuck_requests == before + 1


def test_grammar_wins_over_a_bad_word(engine):
    """A bad word that is all that the grammar allows is emitted."""
    both = answer_to(engine, {"regex": "a{5}"}, bad_words=["a"])
    assert (both.text, both.finish_reason) == ("aaaaa", "stop")
    # Where there is a way around it, it is not.
    assert answer_to(engine, {"regex": "[ab]{5}"}, bad_words=["a"]).text == "bbbbb"


def test_nothing_but_bad_words(engine):
    """A request that allows nothing except bad words ends with a reason."""
    only = engine.llm.get_tokenizer().encode("a", add_special_tokens=False)
    stuck = answer_to(engine, {}, allowed_token_ids=only, bad_words=["a"])
    assert_stuck(stuck, "bad_words")


def test_bad_words_keep_to_allowed_ids(engine):
    """With bad words, also across canvases, an answer has only allowed ids."""
    allowed = engine.llm.get_tokenizer().encode("abc", add_special_tokens=False)
    options = {"allowed_token_ids": allowed, "bad_words": ["ab"], "max_tokens": 32}
    text = answer_to(engine, {}, **options).text
    assert set(text) <= set("abc")
    assert "ab" not in text


@pytest.mark.parametrize(
    ("constraint", "stop"), [({"choice": ["one"]}, "n"), ({"regex": "a{5}"}, "a")]
)
def test_stop_token_within_the_language(engine, constraint, stop):
    """A stop token may follow only a complete text, so a constraint that needs it ends."""
    tokens = engine.llm.get_tokenizer().encode(stop, add_special_tokens=False)
    assert_stuck(answer_to(engine, constraint, stop_token_ids=tokens))


def test_canvas_that_never_settles(engine, monkeypatch):
    """Passes without a settled position are bounded, and neighbors go on."""
    never = ConstrainedCanvas.allowed_tokens

    def allowed_tokens(self, width):
        told = never(self, width)
        self._pinned = []
        return type(told)((), told.frontier_mask, restart=False, num_valid=0)

    monkeypatch.setattr(ConstrainedCanvas, "allowed_tokens", allowed_tokens)
    add(engine, "stuck", constrained(engine, {"regex": "[a-z]{40}"}))
    add(engine, "neighbour", constrained(engine, {}))
    outputs, ended = drain(engine)
    assert "no position was settled" in outputs["stuck"].stop_reason
    assert ended["stuck"] <= 2 * CAP + 8
    assert outputs["neighbour"].finish_reason in ("stop", "length")


def test_grammar_that_raises(engine, monkeypatch):
    """An exception of a back end ends the request of that grammar, and no other."""
    checks = GuidedText.validate_tokens

    def validate_tokens(self, tokens):
        if getattr(self, "is_broken", False):
            raise RuntimeError("broken")
        return checks(self, tokens)

    monkeypatch.setattr(GuidedText, "validate_tokens", validate_tokens)
    whole = constrained(engine, {"regex": "[a-z]{5}"})
    for name in ("broken", "whole"):
        add(engine, name, whole)
    core = engine.llm.llm_engine
    outputs = {}
    while core.has_unfinished_requests():
        for request in engine.scheduler.requests.values():
            grammar = request.structured_output_request.grammar
            if request.request_id.startswith("broken") and grammar is not None:
                grammar.is_broken = True
        outputs |= {o.request_id: o.outputs[0] for o in core.step() if o.finished}
    assert outputs["broken"].stop_reason == "structured_outputs failed here (RuntimeError: broken)"
    assert len(outputs["whole"].text) == 5


def test_slow_constraint_makes_room(engine):
    """A canvas past its step cap lets waiting requests go first and keeps its tokens."""
    slow = {"regex": "[xyz]{31}q"}
    options = {"max_tokens": 32, "extra_args": {"diffusion_max_steps": 2}}
    for i in range(NUM_SLOTS):
        add(engine, f"slow {i}", constrained(engine, slow, **options))
    for i in range(2 * NUM_SLOTS):
        add(engine, f"quick {i}", constrained(engine, {}))
    outputs, ended = drain(engine)
    assert max(ended[f"quick {i}"] for i in range(2 * NUM_SLOTS)) < min(
        ended[f"slow {i}"] for i in range(NUM_SLOTS)
    )
    alone = answer_to(engine, slow, **options).token_ids
    assert all(outputs[f"slow {i}"].token_ids == alone for i in range(NUM_SLOTS))


@pytest.mark.slow
def test_hostile_requests_do_not_starve_others(tmp_path):
    """Honest requests after hostile ones wait at most twice as long as after legal ones.

    In engine steps, on weights that converge neither with a constraint nor without one. All of them
    may take the same number of steps per canvas, and request as many tokens.
    """
    # Room for eight at once.
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    with TracedEngine(random_checkpoint(tmp_path), **options) as engine:
        legal = last_honest_answer(engine, LEGAL)
        hostile = last_honest_answer(engine, HOSTILE)
    print(f"honest requests end with step {legal} behind legal ones, {hostile} behind others")
    assert hostile <= 2 * legal
