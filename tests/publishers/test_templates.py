"""Published chat templates write what the served path reads: turns, tool calls and thoughts."""

import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.publishers import checkout
from tests.support.families.published import expected, files_of
from vllm_diffusion.startup.published_checkpoints import checkpoint_families

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Turns(NamedTuple):
    """How a family's template writes an assistant's turn.

    Attributes:
        header: What begins it.
        end: What ends it.
        is_an_end: True if that token ends an answer; otherwise the tokenizer's end does, after it.
        closed: What follows the header where thoughts are off; ``""`` for nothing.
    """

    header: str
    end: str
    is_an_end: bool
    closed: str = ""


CHATML = Turns("<|im_start|>assistant\n", "<|im_end|>", True)
LLADA2 = Turns("<role>ASSISTANT</role>", "<|role_end|>", False)
NO_THOUGHTS = "<think>\n\n</think>\n\n"
SDAR = CHATML._replace(closed=NO_THOUGHTS)
# Checkout and folder or file of each template.
TEMPLATES = {
    "JetLM/SDAR-1.7B-Chat": ("DARE", "models/SDAR-1dot7B-Chat", SDAR),
    "JetLM/SDAR-4B-Chat": ("SDAR", "training/model/SDAR-4B-Chat", SDAR),
    "JetLM/SDAR-30B-A3B-Chat": ("DARE", "models/SDAR-30B-A3B-Chat", SDAR),
    "inclusionAI/LLaDA2.0-mini": ("DARE", "models/LLaDA2.0-mini", LLADA2),
    "inclusionAI/LLaDA2.1-mini": ("DARE", "models/LLaDA2.1-mini", LLADA2),
    "GSAI-ML/LLaDA-8B-Instruct": (
        "dllm-research",
        "models/LLaDA-8B-Instruct",
        Turns("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", False),
    ),
    "Dream-org/Dream-v0-Instruct-7B": (
        "dllm-research",
        "models/Dream-7B-Instruct",
        CHATML._replace(is_an_end=False),
    ),
    "Efficient-Large-Model/Fast_dLLM_v2_7B": (
        "DualDiffusion",
        "FastDLLM_inferencing/Fast_dLLM_v2_7B",
        CHATML,
    ),
    "nvidia/diffusiongemma-26B-A4B-it-NVFP4": (
        "diffusiongemma-26b-nvfp4-sm121-vllm",
        "docs/upstream/hf-model-api.json",
        Turns("<|turn>model\n", "<turn|>", True, "<|channel>thought\n<channel|>"),
    ),
}
ALL = pytest.mark.parametrize("name", TEMPLATES)
MARKS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>"]
MARKS += ["<|tool_response>", "<tool_response|>", "<think>", "</think>", "<|endoftext|>"]
MARKS += ["<|startoftext|>"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 7+8?"},
    {"role": "assistant", "content": "It is 15."},
    {"role": "user", "content": "And 9?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ARGUMENTS = {"a": 7, "text": "seven, {x}"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    ],
}


def template_of(name: str) -> str:
    """Read a template from its checkout."""
    repository, where, _ = TEMPLATES[name]
    place = checkout(repository) / where
    if place.is_file():
        return str(json.loads(place.read_text())["config"]["chat_template_jinja"])
    for file in (place / "chat_template.jinja", place / "tokenizer_config.json"):
        if file.is_file():
            text = file.read_text()
            return text if file.suffix == ".jinja" else str(json.loads(text)["chat_template"])
    pytest.skip(f"the checkout {repository} has no {where}")


def tokenizer_with(template: str) -> Any:
    """Make a tokenizer of the marks alone, which lends its method to render the template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {mark: number for number, mark in enumerate(["?", *MARKS])}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="?")),
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        unk_token="?",
    )
    made.chat_template = template
    return made


def rendered(name: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str:
    """Render a conversation as vLLM's server does."""
    from vllm.renderers.hf import safe_apply_chat_template

    template = template_of(name)
    model: Any = SimpleNamespace(hf_config=None, trust_remote_code=False, model=name)
    text: str = safe_apply_chat_template(
        model,
        tokenizer_with(template),
        messages,
        tools=tools,
        chat_template=template,
        tokenize=False,
        **options,
    )
    return text


def parser_in_command(name: str, option: str) -> str | None:
    """Return the parser that the documented command gives a checkpoint."""
    for family in checkpoint_families():
        for checkpoint in family.checkpoint:
            words = family.command(checkpoint).split()
            if checkpoint.id == name and option in words:
                return words[words.index(option) + 1]
    return None


@ALL
def test_turns(name: str) -> None:
    """A conversation has its texts in order, each finished turn has its end, and the prompt for an
    answer ends with the assistant's header.
    """
    turns = TEMPLATES[name][2]
    prompt = rendered(name, TALK, add_generation_prompt=True)
    places = [prompt.index(str(message["content"])) for message in TALK]
    assert places == sorted(places)
    assert f"{turns.header}It is 15.{turns.end}" in prompt
    without = rendered(name, TALK, add_generation_prompt=False)
    if "LLaDA-8B" in name:
        # As docs/use/models.md says.
        assert without == prompt
    else:
        assert turns.header not in without[without.index("And 9?") :]
    closed = turns.closed if "gemma" in name else ""
    assert prompt.endswith(turns.header + closed)


@ALL
def test_thoughts_off(name: str) -> None:
    """With ``enable_thinking=false`` the prompt closes the thoughts, where the template has any."""
    turns = TEMPLATES[name][2]
    prompt = rendered(name, TALK, add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith(turns.header + turns.closed)


@ALL
def test_what_ends_an_answer(name: str) -> None:
    """The end of a turn is one of the tokens that end an answer, or, where the publisher's loop
    waits for another one, is a special token, which no answer shows.
    """
    turns = TEMPLATES[name][2]
    (row,) = [row for row in expected() if row.id == name]
    files = files_of(name).files
    known = files.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
    ids = {entry["content"]: int(number) for number, entry in known.items()}
    if not ids:
        # tokenizer.json alone has the ids, and was not found.
        assert turns.end not in row.values["ends"]
        return
    assert (ids[turns.end] in row.values["ends"]) is turns.is_an_end
    assert known[str(ids[turns.end])]["special"]
    assert set(row.values["ends"]) <= {*ids.values()}


@ALL
def test_calls_are_read_back(name: str) -> None:
    """The tool parser of the documented command reads the call that the template writes, and a
    family without one has a template that writes no tools.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    (row,) = [row for row in expected() if row.id == name]
    parser = parser_in_command(name, "--tool-call-parser")
    assert parser == row.values.get("parsers")
    if parser is None:
        assert rendered(name, TALK, [TOOL]) == rendered(name, TALK)
        return
    offered = rendered(name, TALK, [TOOL], add_generation_prompt=True)
    assert "add" in offered
    assert "Adds." in offered
    text = rendered(name, [*TALK, CALL], [TOOL])
    answer = text[text.index("And 9?") + len("And 9?") :]
    header = TEMPLATES[name][2].header
    answer = answer[answer.index(header) + len(header) :]
    tokenizer = tokenizer_with(template_of(name))
    request = ChatCompletionRequest(messages=TALK, tools=[TOOL], model=name)
    found = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(
        answer, request
    )
    (call,) = found.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_thoughts_are_read_back() -> None:
    """The reasoning parser of the documented command splits the thoughts that the template
    writes.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    name = "nvidia/diffusiongemma-26B-A4B-it-NVFP4"
    parser = parser_in_command(name, "--reasoning-parser")
    assert parser is not None
    thoughts = CALL | {"reasoning": "I add."}
    text = rendered(name, [*TALK, thoughts], [TOOL], enable_thinking=True)
    answer = text[text.rindex("<|turn>model\n") + len("<|turn>model\n") :]
    tokenizer = tokenizer_with(template_of(name))
    request = ChatCompletionRequest(messages=TALK, tools=[TOOL], model=name)
    reader = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
    reasoning, rest = reader.extract_reasoning(answer, request)
    assert (reasoning or "").strip() == "I add."
    assert (rest or "").startswith("<|tool_call>call:add")
