"""A streamed answer as it comes over HTTP, with a check of every event's place."""

import json
from collections import defaultdict
from typing import Any

import httpx

from tests.pairs.answers import Choice
from tests.support.engines.server import MODEL, Server


class OrderedStream:
    """Reads one stream, and holds each event to what came before it.

    Attributes:
        choices: Each choice, by its index.
        frames: Its frames, likewise, in order.
        step_maps: Likewise.
        num_tokens: Tokens of all choices, by the usage.
    """

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.choices: dict[int, Choice] = defaultdict(Choice)
        self.frames: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.step_maps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.num_tokens = 0
        ended = False
        body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
        with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=300) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                assert not ended, f"behind [DONE]: {line}"
                ended = line == "data: [DONE]"
                if not ended:
                    self._take(json.loads(line.removeprefix("data: ")))
        assert ended
        for index, frames in self.frames.items():
            last = [frame for frame in frames if frame["is_last"]]
            assert [frame["block"] for frame in last] == list(range(len(last)))
            assert frames[-1]["is_last"]
            committed = self.choices[index]
            assert "".join(frame["text"] for frame in last) == committed.text
            assert "".join(frame.get("reasoning", "") for frame in last) == committed.thought
            calls = [call for frame in last for call in frame.get("tool_calls", ())]
            arguments = [(call.get("function") or {}).get("arguments") or "" for call in calls]
            assert "".join(arguments) == self.arguments(index)
        assert self.num_tokens == sum(
            frame["num_tokens"] for of in self.frames.values() for frame in of if frame["is_last"]
        )

    def arguments(self, index: int) -> str:
        """Return the arguments of all tool calls of a choice."""
        return "".join(call["arguments"] for call in self.choices[index].calls)

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        if usage := chunk.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            index = choice["index"]
            if chunk.get("type") == "diffusion_frame":
                # What is before the canvas has come, and nothing of the canvas has.
                assert chunk["offset"] == len(self.choices[index].text)
                self.frames[index].append(chunk)
            elif chunk.get("type") == "diffusion_step_map":
                # Behind the canvas's last frame.
                assert self.frames[index][-1]["is_last"]
                assert self.frames[index][-1]["block"] == chunk["block"]
                assert self.frames[index][-1]["num_tokens"] == len(chunk["steps"])
                self.step_maps[index].append(chunk)
            else:
                self.choices[index].take(choice)
