"""A stream has the parts of the whole answer, for any order of marks and any cut of deltas."""

import copy
import json
import shutil
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.end_to_end.test_masked_tools import say_thoughts
from tests.support.engines.vllm_configs import vllm_config
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.tool_schemas import tool, tool_request
from vllm_diffusion import plugin
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.live.streamed_parser import following_whole_answers

pytestmark = pytest.mark.engine

PROMPT = [2, 7, 8]
PIECES = {
    "gemma": {
        "open": "<|channel>thought\n",
        "thought": "<|channel>thought\nHm.\n<channel|>",
        "text": "Some words. ",
        "call": "<|tool_call>call:store{a:1}<tool_call|>",
        "call again": '<|tool_call>call:store{a:2,b:<|"|>x y z<|"|>}<tool_call|>',
        "more": " And more.",
        "thought again": "<|channel>thought\nAgain.<channel|>",
    },
    "qwen": {
        "open": "<think>",
        "close": "</think>",
        "thought": "<think>Hm.\n</think>",
        "text": "Some words. ",
        "call": '<tool_call>\n{"name": "store", "arguments": {"a": 1}}\n</tool_call>',
        "call again": '<tool_call>{"name": "store", "arguments": {"a": 2, "b": "x"}}</tool_call>',
        "more": " And more.",
    },
}
PARSERS = {"gemma": ("gemma4", "gemma4"), "qwen": ("qwen3", "hermes")}


class Family:
    """A tokenizer with its pieces, and vLLM's parsers as a server makes them."""

    def __init__(self, name: str, folder: Path) -> None:
        plugin.register()
        checkpoint = SHIPPED
        if name == "qwen":
            checkpoint = folder / "sdar"
            shutil.copytree(shipped_checkpoint("sdar"), checkpoint)
            say_thoughts(checkpoint)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.pieces = {
            piece: self.tokenizer.encode(text, add_special_tokens=False)
            for piece, text in PIECES[name].items()
        }
        reasoning, calls = PARSERS[name]
        self.stock = ParserManager.get_parser(
            tool_parser_name=calls, reasoning_parser_name=reasoning, enable_auto_tools=True
        )
        assert self.stock is not None
        self.following = following_whole_answers(self.stock)
        self.model_config = vllm_config().model_config

    def tokens(self, order: tuple[str, ...]) -> list[int]:
        end: int = self.tokenizer.eos_token_id
        return sum((self.pieces[piece] for piece in order), []) + [end]

    def parser(self, cls: Any, request: Any) -> Any:
        return cls(self.tokenizer, request.tools, model_config=self.model_config)

    def detokenizer(self) -> Any:
        params = SamplingParams(skip_special_tokens=False)
        request = SimpleNamespace(
            sampling_params=params, prompt_token_ids=PROMPT, prompt_embeds=None, request_id="a"
        )
        return IncrementalDetokenizer.from_new_request(self.tokenizer, request)  # type: ignore[arg-type]


def a_request(**fields: Any) -> Any:
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    tools = [tool({"type": "object", "properties": properties})]
    return tool_request(tools, **{"tool_choice": "auto"} | fields)


def whole(family: Family, request: Any, tokens: list[int]) -> tuple[Any, ...]:
    """Return thought, text and calls of vLLM's own whole answer."""
    detokenizer = family.detokenizer()
    detokenizer.update(tokens, True)
    parser = family.parser(family.stock, request)
    parser.set_prompt_token_ids(PROMPT)
    reasoning, content, calls = parser.parse(
        detokenizer.output_text, request, enable_auto_tools=True, model_output_token_ids=tokens
    )
    return (
        reasoning or "",
        (content or "").strip(),
        [(call.name, json.loads(call.arguments)) for call in calls or ()],
        parser.count_reasoning_tokens(tokens),
    )


def streamed(
    family: Family, request: Any, tokens: list[int], width: int, *, looks_ahead: bool = False
) -> tuple[Any, ...]:
    """Return the same parts from the deltas of a stream, as the chat endpoint makes them."""
    cls = family.following
    parser = family.parser(cls, request)
    answer = ChatStreamProcessor(request, parser, enable_auto_tools=True, parser_cls=cls)
    detokenizer = family.detokenizer()
    reasoning, content, calls = "", "", {}
    for i in range(0, len(tokens), width):
        chunk, finished = tokens[i : i + width], i + width >= len(tokens)
        detokenizer.update(chunk, finished)
        text = detokenizer.get_next_output_text(finished, True)
        step = (text, list(chunk), "stop" if finished else None, PROMPT)
        if looks_ahead:
            # As a frame does, whose text the answer need not get.
            shared = (request, family.tokenizer, family.model_config)
            ahead = copy.deepcopy(answer, {id(one): one for one in shared})
            ahead.step(text + "never", *step[1:])
        delta, reason = answer.step(*step)
        for call in delta.tool_calls if delta else ():
            assert call.function is not None
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            assert bool(call.id) == bool(call.function.name)
            name_and_arguments[0] += call.function.name or ""
            name_and_arguments[1] += call.function.arguments or ""
        reasoning += (delta.reasoning if delta else None) or ""
        content += (delta.content if delta else None) or ""
    assert reason == ("tool_calls" if calls else "stop")
    assert list(calls) == list(range(len(calls)))
    read = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return reasoning, content.strip(), read, parser.count_reasoning_tokens(tokens)


@pytest.fixture(scope="module", params=PIECES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp("family"))


# A canvas of 32 tokens holds several marks and cuts others, so it takes orders of three pieces; the
# other widths take these where slow tests run.
@pytest.mark.parametrize(
    ("width", "most", "looks_ahead"),
    [
        *((width, 2, False) for width in (1, 2, 7, 1000)),
        *((32, 3, False), (2, 2, True), (7, 2, True)),
        *(pytest.param(width, 3, False, marks=pytest.mark.slow) for width in (1, 2, 7, 1000)),
    ],
)
def test_every_order_of_marks(width: int, most: int, looks_ahead: bool, family: Family) -> None:
    """A stream has the whole answer's thought, text, calls and number of thought tokens.

    A copy of a parser that reads ahead for a frame does not change the parser itself.
    """
    request = a_request()
    for size in range(1, most + 1):
        for order in permutations(family.pieces, size):
            tokens = family.tokens(order)
            seen = streamed(family, request, tokens, width, looks_ahead=looks_ahead)
            assert seen == whole(family, request, tokens), order


def test_hidden_thoughts(family: Family) -> None:
    """With ``include_reasoning`` false a stream has the text and the calls, and no thought."""
    request = a_request(include_reasoning=False)
    tokens = family.tokens(("thought", "text", "call"))
    _, *expected = whole(family, request, tokens)
    assert streamed(family, request, tokens, 7) == ("", *expected)
