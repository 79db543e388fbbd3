"""vLLM's parser of Gemma's tool calls, which for a diffusion model and for DiffusionGemma's encoder also demands them.

vLLM lets a tool parser turn the request's tools into a structural tag; its parser of Gemma's format has
none, because xgrammar knows schemas in JSON and XML only. This one has, with rules of Lark in it, which
``tag_grammar`` reads: ``tool_choice`` ``required`` and named are held to, and ``auto`` where a tool is
strict or the server is set so, as with vLLM's other parsers. For any other model it is vLLM's own.
"""

from __future__ import annotations

from typing import Any

from vllm.parser.gemma4 import Gemma4Parser
from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.structural_tag_registry import (
    get_structural_tag_tools,
    resolve_tool_strictness,
)
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from vllm_diffusion.requests.tool_calls.gemma_grammar import Markers, call_grammar
from vllm_diffusion.requests.tool_calls.schema_reader import ToolSchemaError, read_arguments
from vllm_diffusion.requests.tool_calls.value_forms import Members

# Names our tag in vLLM's registry of tags, where it is not listed: only functions are called.
TAG = "gemma4"


class GemmaCallParser(Gemma4Parser):
    """vLLM's parser, given schemas that it can read types from."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, **kwargs)
        self._read_tools: tuple[Any, list[Any]] | None = None

    def _check_skip_tool_parsing(self, request: Any) -> None:
        super()._check_skip_tool_parsing(request)
        tools = getattr(request, "tools", None)
        if not tools:
            return
        # Read for every chunk of a stream.
        if self._read_tools is None or self._read_tools[0] is not tools:
            self._read_tools = (tools, [_with_readable_schema(tool) for tool in tools])
        self._tools = self._read_tools[1]


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
        called = [tool for tool in strict_tools if named in (None, _function(tool).name)]
        tags = _tags([_function(tool) for tool in called], markers)
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


def _function(tool: Any) -> Any:
    """Name, parameters and strictness: nested in a chat's tool, not in a response's."""
    return getattr(tool, "function", tool)


def _named(tool_choice: Any) -> str | None:
    if tool_choice is None or isinstance(tool_choice, str):
        return None
    name: str = _function(tool_choice).name
    return name


def _arguments(function: Any) -> Members:
    return read_arguments(
        getattr(function, "parameters", None), strict=getattr(function, "strict", None) is True
    )


def _tags(functions: list[Any], markers: Markers) -> list[Any]:
    """Write the tags of all tools; those that cannot be followed are refused together."""
    from vllm.exceptions import VLLMValidationError
    from xgrammar.structural_tag import GrammarFormat, TagFormat, TokenFormat

    tags, problems = [], {}
    for i, function in enumerate(functions):
        try:
            grammar = call_grammar(function.name, _arguments(function), markers, f"tool{i}")
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
        raise VLLMValidationError(
            f"tools: {'; '.join(problems.values())}.",
            parameter="tools",
            value=", ".join(problems),
        )
    return tags


def _with_readable_schema(tool: Any) -> Any:
    """A copy of ``tool`` whose schema the parser can read, or ``tool`` itself."""
    function = _function(tool)
    try:
        arguments = _arguments(function)
    except (ToolSchemaError, AttributeError):
        return tool
    parameters = {
        "type": "object",
        "properties": {name: value.schema() for name, value in arguments.properties.items()},
    }
    read = function.model_copy(update={"parameters": parameters})
    return read if function is tool else tool.model_copy(update={"function": read})
