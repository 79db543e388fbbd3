"""With ``prediction``, canvases start from a text that the answer is expected to resemble."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.engines.engine import TracedEngine
from tests.support.families import makers as tiny
from tests.support.families.llada2_model import llada2, llada2_2
from tests.support.families.model import MASK_ID, prompt_of
from tests.support.models.prompts import chat_prompt
from vllm_diffusion.canvas.predictions import FollowedText, expected
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

ORDERS = [
    pytest.param(False, id="synchronous"),
    pytest.param(True, id="asynchronous"),
]
# The shipped DiffusionGemma.
in_both_orders = pytest.mark.parametrize("engine", ORDERS, indirect=True)
WIDTH = 32
WORDS = ["kite", "lemon", "stone", "lamp", "rose", "bird", "fish", "tree", "house", "chair"]
LIST = "\n".join(f"- {word}" for word in WORDS)
QUESTION = f"Make a bullet list: {', '.join(WORDS)}."


def params(prediction: Any, **changes: Any) -> SamplingParams:
    """Return parameters with a prediction, unless that is ``None``."""
    extra = changes.pop("extra_args", {})
    if prediction is not None:
        extra["diffusion_prediction"] = prediction
    return SamplingParams(**({"max_tokens": 120, "seed": 5, "extra_args": extra} | changes))


def asked(engine: TracedEngine, text: str) -> list[int]:
    """Return a chat's prompt as token ids."""
    return chat_prompt(engine.llm.get_tokenizer(), text)


@in_both_orders
def test_canvases_start_from_it(engine: TracedEngine) -> None:
    """A predicted answer takes fewer passes, is the same, and changes no other request."""
    prompt, other = asked(engine, QUESTION), asked(engine, "Count from 3 to 12.")
    (alone,) = engine.outputs([other], [params(None)])
    plain, _ = engine.outputs([prompt, other], [params(None), params(None)])
    texts = [LIST, LIST.replace("stone", "stove"), "zq" * 60]
    outputs = engine.outputs([prompt] * len(texts) + [other], [*map(params, texts), params(None)])
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    of_plain = request_metrics(plain.outputs[0])
    assert len(of_plain.denoise_steps_per_canvas) >= 3
    assert of_plain.accepted_prediction_tokens == of_plain.rejected_prediction_tokens == 0
    for text, output in zip(texts, outputs, strict=False):
        (answer,) = output.outputs
        metrics = request_metrics(answer)
        num_predicted = metrics.accepted_prediction_tokens + metrics.rejected_prediction_tokens
        assert num_predicted <= len(answer.token_ids)
        if text.startswith("zq"):
            # The first canvas; from the second one on nothing of the text is found again.
            assert metrics.rejected_prediction_tokens >= WIDTH // 2
            assert num_predicted == WIDTH
            continue
        assert answer.text == LIST
        assert metrics.accepted_prediction_tokens > 0.8 * len(answer.token_ids)
        assert metrics.passes < of_plain.passes


@in_both_orders
@pytest.mark.parametrize("of_prompt", [False, True])
def test_where_they_start(engine: TracedEngine, of_prompt: bool) -> None:
    """Each canvas starts where the host finds the emitted tokens in the text, in both orders."""
    prompt = asked(engine, QUESTION)
    tokenizer = engine.llm.get_tokenizer()
    text = prompt if of_prompt else tokenizer.encode(LIST, add_special_tokens=False)
    with engine.recording() as steps:
        (output,) = engine.outputs(
            [prompt], [params("prompt" if of_prompt else LIST, ignore_eos=True, max_tokens=128)]
        )
    tokens = list(output.outputs[0].token_ids)
    canvases = []
    for step in steps:
        if not step.encoding:
            canvases.append(step.canvas.tolist())
    counts = request_metrics(output.outputs[0]).denoise_steps_per_canvas
    # One more pass may have been on its way.
    assert len(canvases) >= sum(counts)
    followed = FollowedText(text, is_prompt=of_prompt)
    first_step = num_started = 0
    for number, num_steps in enumerate(counts):
        start = expected(followed.progress, followed.texts, WIDTH)[0].tolist()
        began = canvases[first_step]
        assert [token for token in start if token >= 0] == [
            token for token, wanted in zip(began, start, strict=True) if wanted >= 0
        ]
        num_started += start != [-1] * WIDTH
        followed.advance(tokens[number * WIDTH : (number + 1) * WIDTH])
        first_step += num_steps
    metrics = request_metrics(output.outputs[0])
    assert metrics.accepted_prediction_tokens == followed.accepted
    assert metrics.rejected_prediction_tokens == followed.rejected
    assert num_started >= (1 if of_prompt else 2)


@pytest.mark.parametrize("is_asynchronous", ORDERS)
@pytest.mark.parametrize(
    ("make", "rule"), [(llada2, {"rule": "reveal_and_edit"}), (llada2_2, {})], ids=["2.1", "2.2"]
)
def test_a_rule_that_edits(
    tmp_path: Path, make: Any, rule: dict[str, str], is_asynchronous: bool
) -> None:
    """LLaDA2.1 and 2.2 start a block from the text after the prompt's tokens, and go on later."""
    with TracedEngine(
        make().save(tmp_path),
        async_scheduling=is_asynchronous,
        max_model_len=256,
        additional_config={"diffusion": rule},
    ) as engine:
        prompt = prompt_of(37, seed=1)
        length = engine.state.canvas_length
        text = "".join(chr(97 + i % 26) for i in range(80))
        ids = engine.llm.get_tokenizer().encode(text, add_special_tokens=False)
        # A threshold of 1 rewrites nothing, so that the text is the answer.
        own = {"diffusion_editing_threshold": 1.0, "diffusion_prediction": text}
        asked_for = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0, extra_args=own)
        (output,) = engine.outputs([prompt], [asked_for])
    answer = output.outputs[0]
    assert list(answer.token_ids) == ids[:60]
    assert request_metrics(answer).accepted_prediction_tokens == 60
    assert length < 60
    assert MASK_ID not in answer.token_ids


def test_a_family_that_cannot_revise(tmp_path: Path) -> None:
    """SDAR, whose revealed tokens are final, refuses a prediction by name."""
    with TracedEngine(tiny.sdar(block_length=16).save(tmp_path)) as engine:
        wanted = SamplingParams(max_tokens=8, extra_args={"diffusion_prediction": "a text"})
        with pytest.raises(VLLMValidationError, match="cannot revise") as refused:
            engine.outputs([prompt_of(5, seed=1)], [wanted])
        assert refused.value.parameter == "diffusion_prediction"


@in_both_orders
def test_forms(engine: TracedEngine) -> None:
    """OpenAI's object equals its text or parts, and an empty one means no prediction."""
    half = len(LIST) // 2
    parts = [{"type": "text", "text": part} for part in (LIST[:half], LIST[half:])]
    forms = [LIST, {"type": "content", "content": LIST}, {"type": "content", "content": parts}]
    nothing = [None, "", {"type": "content", "content": ""}]
    prompt = asked(engine, QUESTION)
    # Afterwards the cache has the prompt for each of them.
    engine.outputs([prompt], [params(None)])
    outputs = engine.outputs([prompt] * 6, [params(form) for form in forms + nothing])
    counts = [request_metrics(one.outputs[0]) for one in outputs]
    assert len({repr(one) for one in counts[:3]}) == 1
    assert len({repr(one) for one in counts[3:]}) == 1
    assert counts[0].accepted_prediction_tokens > 0
