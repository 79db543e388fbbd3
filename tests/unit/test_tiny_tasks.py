"""The tiny checkpoint's tasks, tokenizer and chat template: what training and evaluation assume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import SHIPPED
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
sys.path.insert(0, str(EXAMPLES))

import tiny_model  # noqa: E402
import tiny_sdar  # noqa: E402
from tiny_tasks import (  # noqa: E402
    Example,
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.build_tokenizer()


def render(tokenizer, example: Example, **kwargs) -> str:
    return tokenizer.apply_chat_template(
        example.messages, tokenize=False, add_generation_prompt=True, **kwargs
    )


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
