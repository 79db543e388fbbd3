"""Parsers of streams that say what a whole answer says, whatever a delta holds.

A delta of a diffusion model is a canvas, which may hold the end of a thought, text, a call, text
after the call and a thought that reopens. vLLM's parsers read streams of few tokens at a time: once
a thought has ended they no longer look for another, and where a canvas holds several marks they
lose text. They read a whole answer in two passes, thoughts first and then calls in the text that
remains. Here a stream takes the same two passes, delta after delta, and its last delta brings what
the whole answer has beyond what was sent.

Text that the whole answer may drop waits: blanks until something follows them, and everything after
a call until the end, since most of vLLM's parsers drop it from whole answers.
"""

import copy
from itertools import groupby
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.events import EventType
from vllm.renderers.chat_utils import make_tool_call_id


def following_whole_answers(parser_cls: type) -> type:
    """Return a subclass of one of vLLM's parsers whose streams equal its whole answers.

    Args:
        parser_cls: Class of ``vllm.parser.abstract_parser.Parser``.
    """

    class WholeAnswer(parser_cls):
        """Parser of a finished stream, whose calls the stream has counted already."""

        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            if not isinstance(self, DelegatingParser) or self.tool_parser is None:
                return super().extract_tool_calls(model_output, request)
            return self.tool_parser.extract_tool_calls(model_output, request=request)

    class Following(_Following, parser_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # A function, which a copy of the parser shares.
            self._another = lambda: WholeAnswer(*args, **kwargs)
            self._begin(reads_in_passes=issubclass(parser_cls, DelegatingParser))

    Following.__name__ = Following.__qualname__ = parser_cls.__name__
    return Following


class _Following:
    """What :func:`following_whole_answers` adds to a parser."""

    _another: Any
    _reasoning_parser: Any
    _tool_parser: Any
    _stream_state: Any

    def _begin(self, *, reads_in_passes: bool) -> None:
        reasoning = self._reasoning_parser
        # Other parsers of thoughts find them by token ids, and have one path for streams.
        self._in_passes = reads_in_passes and (
            reasoning is None or bool(getattr(reasoning, "engine_based_streaming", False))
        )
        self._texts: list[str] = []
        self._sent = {"reasoning": "", "content": ""}
        self._waiting = {"reasoning": "", "content": ""}
        # Name and arguments of each call that was sent, by its index.
        self._calls: dict[int, list[str]] = {}
        self._prompt: list[int] | None = None
        self._content = ""
        self._content_ids: list[int] = []
        self._counter: Any = None
        self._num_counted = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        # vLLM keeps an open argument's state in a function, which a copy would share.
        engine: Any = getattr(copied._tool_parser, "_parser_engine", None)
        for slot in getattr(engine, "_tool_slots", ()):
            if slot.extend_open_value is not None:
                slot.extend_open_value = engine._arg_value_extender(slot.args)
        return copied

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        """Parse one more delta of a stream.

        Args:
            delta_text: Its text.
            delta_token_ids: Its tokens.
            request: A chat's or a response's.
            prompt_token_ids: Tokens of the prompt.
            finished: True if nothing follows.

        Returns:
            vLLM's ``DeltaMessage`` of what can be sent; ``None`` if nothing can.
        """
        self._texts.append(delta_text)
        if self._in_passes:
            delta = self._read(delta_text, delta_token_ids, request, prompt_token_ids)
        else:
            delta = super().parse_delta(  # type: ignore[misc]
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )
        if self._prompt is None and prompt_token_ids is not None:
            self._prompt = prompt_token_ids
        kept = self._keep(delta or DeltaMessage())
        if finished:
            self._add_rest(kept, request)
        if not request.include_reasoning:
            kept.pop("reasoning", None)
        return DeltaMessage(**kept) if kept else None

    def count_reasoning_tokens(self, token_ids: Any) -> int:
        """Count the tokens of thoughts among all tokens so far, of which a stream reads each
        once.
        """
        if not (self._in_passes and self._texts and self._reasoning_parser is not None):
            return super().count_reasoning_tokens(token_ids)  # type: ignore[misc]
        if self._counter is None:
            self._counter = self._another().reasoning_parser
            self._open(self._counter, self._prompt)
        new = list(token_ids[self._num_counted :])
        self._num_counted = len(token_ids)
        text = self._counter.model_tokenizer.decode(new)
        self._counter.extract_reasoning_streaming("", "", text, [], [], new)
        num_tokens: int = self._counter.count_reasoning_tokens(token_ids)
        return num_tokens

    def _open(self, reasoning: Any, prompt_token_ids: list[int] | None) -> None:
        """Tell a parser of thoughts whether the prompt begins or ends one, as vLLM's streams do."""
        if prompt_token_ids is None:
            return
        reasoning.set_prompt_token_ids(prompt_token_ids)
        if not reasoning.is_reasoning_end(prompt_token_ids):
            reasoning.adjust_initial_state_from_prompt(prompt_token_ids)

    def _read(
        self, text: str, token_ids: list[int], request: Any, prompt_token_ids: list[int] | None
    ) -> Any:
        """Take the two passes with one more delta: thoughts, then calls in the remaining text."""
        self._initialize_history_tool_call_cnt(request)  # type: ignore[attr-defined]
        reasoning, delta = self._reasoning_parser, DeltaMessage(content=text)
        if reasoning is not None:
            if self._prompt is None:
                self._open(reasoning, prompt_token_ids)
            engine = reasoning._parser_engine
            with reasoning._skip_tool_parsing():
                engine.initialize_streaming()
                # Without token ids, as whole answers are read, and with the blanks after a thought,
                # which are part of it where it reopens.
                delta = _delta_of(engine, engine._feed(text, []))
        if self._tool_parser is None or not delta.content:
            return delta
        called = self._read_calls(delta.content, token_ids, request) or DeltaMessage()
        if delta.reasoning:
            called.reasoning = delta.reasoning
        return called

    def _read_calls(self, content: str, token_ids: list[int], request: Any) -> Any:
        state, before, ids_before = self._stream_state, self._content, self._content_ids
        if getattr(self._tool_parser, "engine_based_streaming", False):
            before, ids_before, token_ids = "", [], []
        else:
            self._content = before + content
            self._content_ids = ids_before + token_ids
        delta, state.function_name_returned = self._extract_tool_calls_streaming(  # type: ignore[attr-defined]
            previous_text=before,
            current_text=before + content,
            delta_text=content,
            previous_token_ids=ids_before,
            current_token_ids=ids_before + token_ids,
            delta_token_ids=token_ids,
            request=request,
            tool_call_idx=state.history_tool_call_cnt,
            tool_call_id_type=state.tool_call_id_type,
            function_name_returned=state.function_name_returned,
        )
        if delta is not None:
            state.history_tool_call_cnt += sum(call.id is not None for call in delta.tool_calls)
        return delta

    def _keep(self, delta: Any) -> dict[str, Any]:
        """Take from a delta what the whole answer has for certain; the rest waits."""
        kept: dict[str, Any] = {}
        for field in ("reasoning", "content"):
            text = self._waiting[field] + (getattr(delta, field) or "")
            certain = "" if field == "content" and self._calls else text.rstrip()
            self._waiting[field] = text[len(certain) :]
            if certain:
                self._sent[field] += certain
                kept[field] = certain
        for call in delta.tool_calls:
            name_and_arguments = self._calls.setdefault(call.index, ["", ""])
            if call.function is not None:
                name_and_arguments[0] += call.function.name or ""
                name_and_arguments[1] += call.function.arguments or ""
        if delta.tool_calls:
            kept["tool_calls"] = delta.tool_calls
        return kept

    def _add_rest(self, kept: dict[str, Any], request: Any) -> None:
        """Add what the whole answer has beyond what was sent."""
        whole = self._another()
        if self._prompt is not None:
            whole.set_prompt_token_ids(self._prompt)
        # Without automatic calls the server makes no parser of calls.
        reasoning, content, calls = whole.parse(
            "".join(self._texts), request, enable_auto_tools=True
        )
        calls = calls or []
        indices = sorted(self._calls)
        rests: dict[str, str | None] = {
            "reasoning": _rest(reasoning or "", self._sent["reasoning"]),
            "content": _rest(content or "", self._sent["content"]),
        }
        named_alike = [call.name for call in calls[: len(indices)]] == [
            self._calls[index][0] for index in indices
        ]
        if not named_alike or None in rests.values():
            # What was sent cannot be taken back: the stream ends as vLLM's parser read it.
            rests, calls = {**self._waiting}, []
        for field, text in rests.items():
            if text:
                kept[field] = kept.get(field, "") + text
        rest = []
        for call in calls:
            if indices:
                index = indices.pop(0)
                arguments = _rest(call.arguments, self._calls[index][1])
                if arguments:
                    function = DeltaFunctionCall(arguments=arguments)
                    rest.append(DeltaToolCall(index=index, function=function))
                continue
            index = max(self._calls, default=-1) + 1
            self._calls[index] = [call.name, call.arguments]
            function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
            call_id = call.id or make_tool_call_id()
            rest.append(DeltaToolCall(index=index, id=call_id, type="function", function=function))
        if rest:
            kept["tool_calls"] = [*kept.get("tool_calls", ()), *rest]


def _delta_of(engine: Any, events: list[Any]) -> Any:
    """Make the delta of a parser's events, thoughts and text apart: vLLM drops text beside the
    begin of a thought.
    """
    texts: dict[str, str] = {}
    for _, group in groupby(events, key=lambda event: event.type == EventType.REASONING_CHUNK):
        delta = engine._events_to_delta(list(group)) or DeltaMessage()
        for field in ("reasoning", "content"):
            if text := getattr(delta, field):
                texts[field] = texts.get(field, "") + text
    return DeltaMessage(**texts)


def _rest(whole: str, sent: str) -> str | None:
    """Return what a text has after what was sent; ``None`` if it begins otherwise.

    vLLM drops the blanks before a text if a call follows, which a stream cannot know.
    """
    for begun in (sent, sent.lstrip()):
        if whole.startswith(begun):
            return whole[len(begun) :]
    return None
