"""The tiny checkpoint's tasks, tokenizer and chat template: what training and evaluation assume."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import hypothesis
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import SHIPPED
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
sys.path.insert(0, str(EXAMPLES))

import tiny_model  # noqa: E402
import tiny_sdar  # noqa: E402
import tiny_training  # noqa: E402
from evaluate import wilson_interval  # noqa: E402
from tiny_tasks import (  # noqa: E402
    FAMILIES,
    UNCHECKED_FAMILIES,
    Example,
    add_context,
    answer_question,
    draw_question,
    draw_training_example,
    draw_weather,
    evaluation_set,
    is_correct,
)

SIZES = ("one", "few", "many")
NUM_EVALUATED = 500
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.build_tokenizer()


def render(tokenizer, example: Example, **kwargs) -> str:
    return tokenizer.apply_chat_template(
        example.messages, tokenize=False, add_generation_prompt=True, **kwargs
    )


@given(seeds, st.sampled_from(FAMILIES), st.sampled_from(SIZES), st.booleans())
def test_draw_question(seed, family, size, held_out):
    """A draw lies on the side of the split asked for, and a seed draws the same example again."""
    example = draw_question(random.Random(seed), family, size, held_out=held_out)
    assert example == draw_question(random.Random(seed), family, size, held_out=held_out)
    assert example.is_held_out == held_out
    assert is_correct(example, f" {example.answer}\n")
    assert not is_correct(example, example.answer + "x")
    assert not is_correct(example, "")


@given(seeds, st.booleans(), st.booleans())
def test_draw_weather(seed, held_out, with_result):
    """Of its side; the call is one of the declared tool's, as its schema has it, and names the city that was asked for."""
    example = draw_weather(random.Random(seed), held_out=held_out, with_result=with_result)
    assert example.is_held_out == held_out
    assert example.is_call != with_result
    if with_result:
        (call,) = example.after[0]["tool_calls"]
        city = next(iter(call["function"]["arguments"].values()))
        assert example.answer.startswith(f"Weather in {city}: ")
        return
    name, arguments = re.fullmatch(
        r"<\|tool_call>call:(\w+)\{(.*)\}<tool_call\|>", example.answer
    ).groups()
    pairs = dict(pair.split(":", 1) for pair in arguments.split(","))
    values = {
        key: value.removeprefix('<|"|>').removesuffix('<|"|>') for key, value in pairs.items()
    }
    tool = next(t["function"] for t in example.tools if t["function"]["name"] == name)
    jsonschema.validate(values, tool["parameters"] | {"additionalProperties": False})
    assert next(iter(values.values())) in example.question
    assert is_correct(example, f"call:{name}{{{arguments}}}".replace('<|"|>', ""))


def test_a_call_ends_where_its_result_begins(tokenizer):
    """As the published model hands over; whatever else is answered ends the turn, and tools stand in the prompt."""
    rng = random.Random(0)
    for with_result, end in ((False, "<|tool_response>"), (True, "<turn|>")):
        example = draw_weather(rng, held_out=False, with_result=with_result)
        prompt, response = tiny_training.tokenize(tokenizer, example)
        assert response[-1] == tiny_model.TOKEN_ID[end]
        assert example.tools[0]["function"]["name"] in tokenizer.decode(prompt)


@given(seeds)
def test_greetings_in_any_writing(seed):
    """What people type gets the answer of the same words in lower case."""
    example = draw_training_example(random.Random(seed), {"chat": 1.0}, short=True)
    said = example.question.lower().rstrip("!.?")
    again = draw_training_example(random.Random(seed), {"chat": 1.0}, short=True)
    assert example == again
    assert ("You are welcome" in example.answer) == said.startswith("thank")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 7+8?", "15"),
        ("Add 7 and 8.", "15"),
        ("Add up: 7+8, 20+20.", "7+8=15, 20+20=40"),
        ("Reverse the word fox.", "xof"),
        ("Reverse these words: fox, bee.", "fox: xof, bee: eeb"),
        ("Shout fox.", "FOX"),
        ("Count from 98 to 101.", "98, 99, 100, 101"),
        ("Count off: fox, bee.", "fox 1, bee 2"),
        ("Make a JSON record: name fox, age 7.", '{"name": "fox", "age": 7}'),
        ("Make a JSON list: fox 7.", '[{"name": "fox", "age": 7}]'),
        ("Number these words: fox, bee.", "1. fox\n2. bee"),
        ("Make a bullet list: fox.", "- fox"),
    ],
)
def test_answer_question(question, answer):
    assert answer_question(question) == answer


def test_answer_question_unknown():
    """A wording that no family uses is refused by name."""
    with pytest.raises(ValueError, match="Why"):
        answer_question("Why?")


@given(seeds)
def test_draw_training_example(seed):
    """Nothing held out is trained on: not as the question, and not in an earlier turn."""
    weights = dict.fromkeys((*FAMILIES, *UNCHECKED_FAMILIES), 1.0)
    example = draw_training_example(random.Random(seed), weights)
    if example.family in FAMILIES:
        assert not example.is_held_out
    for question, answer in example.turns:
        assert not Example(example.family, question, answer).is_held_out


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_set(family, tokenizer):
    """All held out, all different; a quarter over three canvases, a fifth beyond three windows."""
    examples = evaluation_set(family, NUM_EVALUATED)
    assert examples[:20] == evaluation_set(family, 20)
    assert all(example.is_held_out for example in examples)
    assert len({repr(example.messages) for example in examples}) == NUM_EVALUATED
    num_long = num_far = 0
    for example in examples:
        assert example.answer == answer_question(example.question)
        prompt = tokenizer(render(tokenizer, example), add_special_tokens=False).input_ids
        num_answer_tokens = len(tokenizer(example.answer).input_ids) + 1
        assert len(prompt) + num_answer_tokens < 600
        num_long += num_answer_tokens > 2 * tiny_model.CANVAS_LENGTH
        num_far += len(prompt) > 3 * tiny_model.SLIDING_WINDOW
    assert num_long >= NUM_EVALUATED / 4
    assert num_far >= NUM_EVALUATED / 5


@given(seeds, st.sampled_from(("filler", "turns")))
def test_add_context(seed, context):
    """Context is put before the question and changes neither question nor answer."""
    rng = random.Random(seed)
    example = draw_question(rng, "sums", "one", held_out=True)
    longer = add_context(rng, example, context)
    assert (longer.question, longer.answer) == (example.question, example.answer)
    assert longer.is_held_out
    assert longer.messages[-1]["content"].endswith(example.question)
    assert len(str(longer.messages)) > len(str(example.messages))


@settings(deadline=None)
@given(text=st.text())
@hypothesis.example(text="yes, no; nose")
def test_build_tokenizer(tokenizer, text):
    """Text without control tokens becomes its UTF-8 bytes, "yes" and "no" apart; it comes back."""
    text = text.replace("<", "")
    ids = tokenizer(text).input_ids
    words = {tokenizer.convert_tokens_to_ids(word): word for word in tiny_model.ANSWER_TOKENS}
    assert sum(len(words.get(idx, "b")) for idx in ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_build_tokenizer_control_tokens(tokenizer):
    """Every control token is one token, hidden by ``skip_special_tokens``, at its published id."""
    assert len(tokenizer) == tiny_model.VOCAB_SIZE
    for token, idx in tiny_model.TOKEN_ID.items():
        assert tokenizer(token).input_ids == [idx]
        assert tokenizer.decode([idx], skip_special_tokens=True) == ""
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    assert special == (0, 1, 2)


def test_chat_template(tokenizer):
    """Turns, system text and image in Gemma's form; an empty thought before the answer."""
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<|channel>thought\nold<channel|>Hello"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|turn>system\nBe exact.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
        "<|turn>user\n<|image|>What?<turn|>\n<|turn>model\n" + tiny_model.EMPTY_THOUGHT
    )


def test_chat_template_thinking(tokenizer):
    """``enable_thinking`` asks for thoughts in the system turn and leaves them to the model."""
    text = render(tokenizer, Example("chat", "Hi", ""), enable_thinking=True)
    assert text == "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"


def test_chat_template_tools(tokenizer):
    """Declarations, calls and results are written between their control tokens."""
    tools = [{"type": "function", "function": {"name": "get", "description": "d"}}]
    call = {"function": {"name": "get", "arguments": {"city": "rome", "days": 2}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "get", "content": "sun"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert '<|tool>declaration:get{description:<|"|>d<|"|>' in text
    assert text.endswith(
        '<|turn>model\n<|tool_call>call:get{city:<|"|>rome<|"|>,days:2}<tool_call|>'
        '<|tool_response>response:get{value:<|"|>sun<|"|>}<tool_response|>'
    )


def test_shipped_checkpoint(tokenizer):
    """The shipped files are those that the code writes, complete, and at most 20 MB."""
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["architectures"] == ["DiffusionGemmaForBlockDiffusion"]
    assert config["canvas_length"] == tiny_model.CANVAS_LENGTH
    assert config["text_config"]["sliding_window"] == tiny_model.SLIDING_WINDOW
    assert config["text_config"]["vocab_size"] == len(tokenizer)
    generation = json.loads((SHIPPED / "generation_config.json").read_text())
    assert generation == tiny_model.GENERATION_CONFIG
    template = (SHIPPED / "chat_template.jinja").read_text()
    assert template.strip() == tiny_model.CHAT_TEMPLATE.strip()
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())
    assert shipped["model"] == json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 20_000_000


def test_shipped_sdar():
    """Configuration and settings are those that the code writes, the tokenizer the other's."""
    folder = shipped_checkpoint("sdar")
    assert json.loads((folder / "config.json").read_text()) == tiny_sdar.CONFIG
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == tiny_sdar.GENERATION_CONFIG
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (SHIPPED / name).read_bytes()


@given(st.integers(1, 1000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval(counts):
    """The interval lies in [0, 1] and holds the proportion itself."""
    num_correct, num_trials = counts
    low, high = wilson_interval(num_correct, num_trials)
    assert 0 <= low <= num_correct / num_trials + 1e-12
    assert num_correct / num_trials - 1e-12 <= high <= 1
