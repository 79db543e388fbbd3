"""vLLM's parser of Gemma's tool calls, which for a diffusion model and for DiffusionGemma's encoder
also demands them.

vLLM lets a tool parser turn the request's tools into a structural tag; its parser of Gemma's format
has none, because xgrammar knows schemas in JSON and XML only. This one has, with rules of Lark in
it, which ``tag_grammar`` reads: ``tool_choice`` ``required`` and named are held to, and ``auto``
where a tool is strict or the server is set so, as with vLLM's other parsers. For any other model it
is vLLM's own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.parser.gemma4 import Gemma4Parser, gemma4_config
from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.structural_tag_registry import (
    get_structural_tag_tools,
    resolve_tool_strictness,
)
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import coerce_to_schema_type

from vllm_diffusion.requests.json_schema import json_types
from vllm_diffusion.requests.refusals import refuse
from vllm_diffusion.requests.tool_calls.gemma_grammar import (
    CALL_END,
    CALL_START,
    QUOTE,
    Markers,
    call_grammar,
)
from vllm_diffusion.requests.tool_calls.read_tools import (
    ANY_TOOL,
    ReadTool,
    function_of,
    read_tools,
)
from vllm_diffusion.requests.tool_calls.schema_reader import (
    ANYTHING,
    Items,
    Members,
    ToolSchemaError,
    Value,
)

# Names our tag in vLLM's registry of tags, where it is not listed: only functions are called.
TAG = "gemma4"
# Begins each string for vLLM's reader: no tokenizer writes it where a value begins.
_SIGN = "\0"


class GemmaCallParser(Gemma4Parser):
    """vLLM's parser, which gives each argument the type that the call writes.

    The format tells a string, which stands between two markers, from a number, a boolean and null,
    which stand as they are. vLLM's reader drops the markers and guesses the types from the schema,
    so a string ``7`` beside an integer would be the integer. Here its reader gets each string with
    a sign, and the types are those of the text.
    """

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        thinks = (kwargs.get("chat_template_kwargs") or {}).get("enable_thinking", False)
        config = gemma4_config(thinking=thinks)
        read = config.arg_converter
        assert read is not None
        kwargs["parser_engine_config"] = replace(
            config, arg_converter=lambda text, is_part: read(_with_signs(text), is_part)
        )
        super().__init__(tokenizer, tools, **kwargs)
        self._read: Mapping[str, ReadTool] = {}
        self._streamed: tuple[Any, list[Any]] | None = None

    def _check_skip_tool_parsing(self, request: Any) -> None:
        super()._check_skip_tool_parsing(request)
        tools = getattr(request, "tools", None)
        if not tools:
            return
        # Called for every chunk of a stream.
        if self._streamed is None or self._streamed[0] is not tools:
            self._read = read_tools(tools)
            self._streamed = (tools, [_streamed(tool, self._read) for tool in tools])
        self._tools = self._streamed[1]

    def _fix_arg_types(self, args_json: str, func_name: str) -> str:
        arguments = self._read.get(func_name, ANY_TOOL).arguments
        value = Value({"object": (arguments,)})
        return json.dumps(_typed(json.loads(args_json), value), ensure_ascii=False)


def _with_signs(arguments: str) -> str:
    """Return the text of a call's arguments with a sign at the begin of each string."""
    parts = arguments.split(QUOTE)
    return QUOTE.join(_SIGN + part if i % 2 else part for i, part in enumerate(parts))


def _typed(value: Any, to: Value) -> Any:
    """Return a value that was read from a text with signs.

    Args:
        value: String, list or mapping.
        to: What a schema allows. A string or literal of another type is made one of these where
            that can be, as vLLM does it: free models put numbers between markers, or a word without
            them.
    """
    if isinstance(value, dict):
        members = _only(to, "object", Members)
        others = members.others or ANYTHING if members else ANYTHING
        named = members.properties if members else {}
        return {
            key.removeprefix(_SIGN): _typed(item, named.get(key.removeprefix(_SIGN), others))
            for key, item in value.items()
        }
    if isinstance(value, list):
        items = _only(to, "array", Items)
        return [_typed(item, items.item if items else ANYTHING) for item in value]
    text = value.removeprefix(_SIGN)
    read = text if value.startswith(_SIGN) else _literal(text)
    if not to.forms or json_types(read) & to.forms.keys():
        return read
    return coerce_to_schema_type(text, sorted(to.forms))


def _only(to: Value, name: str, kind: type) -> Any:
    """Return the form of a type if there is one; alternatives say nothing for certain of what is in
    them.
    """
    forms = to.forms.get(name, ())
    return forms[0] if len(forms) == 1 and isinstance(forms[0], kind) else None


def _literal(text: str) -> Any:
    """Return the number, boolean or null of a text, or the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite and not isinstance(value, (list, dict)) else text


class GemmaToolParser(Gemma4EngineToolParser):
    """Parser for ``--tool-call-parser gemma4``."""

    def __init__(
        self,
        tokenizer: Any,
        tools: list[Any] | None = None,
        model_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if model_config is not None and (
            model_config.is_diffusion
            # Also where it answers token after token.
            or getattr(model_config, "architecture", None) == "DiffusionGemmaForBlockDiffusion"
        ):
            self.structural_tag_model = TAG
            self._parser_engine_cls = GemmaCallParser
        super().__init__(tokenizer, tools, model_config=model_config, **kwargs)

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Find the calls of an answer; where none may be made, they are text."""
        if self._reads_text(request):
            model_output = _as_text(model_output)
        return super().extract_tool_calls(model_output, request)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids_and_request: Any
    ) -> Any:
        """Find the calls of the next part of an answer, as of a whole one."""
        if self._reads_text(ids_and_request[-1]):
            # Without token ids, by which the marks would be found.
            ids_and_request = ([], [], [], ids_and_request[-1])
            delta_text = _as_text(delta_text)
        stock = super().extract_tool_calls_streaming
        return stock(previous_text, current_text, delta_text, *ids_and_request)

    def _reads_text(self, request: Any) -> bool:
        return self.structural_tag_model is not None and request.tool_choice == "none"

    def get_structural_tag(
        self,
        request: Any,
        *,
        reasoning: bool = False,
        strict_level: ToolStrictLevel = ToolStrictLevel.AUTO,
    ) -> Any:
        """Make the grammar of answers that a request's tools allow.

        Args:
            request: A chat or responses request with tools.
            reasoning: True if the tag also covers thoughts; vLLM holds it back until they end.
            strict_level: Option ``--tool-strict-level`` of the server.

        Returns:
            xgrammar's ``StructuralTag``; ``None`` if the answer is free.

        Raises:
            VLLMValidationError: If a tool's schema cannot be enforced; the server answers 400.
        """
        from xgrammar import StructuralTag
        from xgrammar.structural_tag import TagsWithSeparatorFormat, TokenTriggeredTagsFormat

        markers = Markers.of(self.model_tokenizer, self.vocab)
        if self.structural_tag_model is None or markers is None or not request.tools:
            return None
        tools = get_structural_tag_tools(TAG, request.tools, request.tool_choice)
        strict_tools = resolve_tool_strictness(tools, request.tool_choice, strict_level)
        if not strict_tools:
            return None
        named = _named(request.tool_choice)
        called = [tool for tool in strict_tools if named in (None, function_of(tool).name)]
        read = read_tools(request.tools)
        tags = _tags([function_of(tool) for tool in called], read, markers)
        if request.tool_choice in (None, "auto"):
            return StructuralTag(
                format=TokenTriggeredTagsFormat(
                    trigger_tokens=[markers.call_start],
                    tags=tags,
                    exclude_tokens=[markers.call_end, markers.quote],
                )
            )
        return StructuralTag(
            format=TagsWithSeparatorFormat(
                tags=tags, separator="", at_least_one=True, stop_after_first=named is not None
            )
        )


def _as_text(text: str) -> str:
    """Write calls without the marks by which they would be found, and would be dropped."""
    return text.replace(CALL_START, "").replace(CALL_END, "").replace(QUOTE, '"')


def _named(tool_choice: Any) -> str | None:
    if tool_choice is None or isinstance(tool_choice, str):
        return None
    name: str = function_of(tool_choice).name
    return name


def _tags(functions: list[Any], read: Mapping[str, ReadTool], markers: Markers) -> list[Any]:
    """Write the tags of all tools; those that cannot be followed are refused together."""
    from xgrammar.structural_tag import GrammarFormat, TagFormat, TokenFormat

    tags, problems = [], {}
    for i, function in enumerate(functions):
        tool = read[function.name]
        try:
            if tool.problem is not None:
                raise ToolSchemaError(tool.problem)
            grammar = call_grammar(function.name, tool.arguments, markers, f"tool{i}")
        except ToolSchemaError as error:
            problems[function.name] = f"{function.name}: {error}"
            continue
        tags.append(
            TagFormat(
                begin=TokenFormat(token=markers.call_start),
                content=GrammarFormat(grammar=grammar),
                end=TokenFormat(token=markers.call_end),
            )
        )
    if problems:
        refuse("tools", f": {'; '.join(problems.values())}.", ", ".join(problems))
    return tags


def _streamed(tool: Any, read: Mapping[str, ReadTool]) -> Any:
    """A copy of ``tool`` from which vLLM learns which arguments are strings, so that they are sent
    as they grow.
    """
    function = function_of(tool)
    if not hasattr(function, "parameters"):
        return tool
    types = {
        name: {"type": "string" if not value.forms or "string" in value.forms else "object"}
        for name, value in read[function.name].arguments.properties.items()
    }
    read_function = function.model_copy(
        update={"parameters": {"type": "object", "properties": types}}
    )
    is_nested = function is not tool
    return tool.model_copy(update={"function": read_function}) if is_nested else read_function
