"""Tests of what the API process takes out of the engine's outputs, of the order of frames, step
maps and outputs, and of the tokens of a frame.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsTensors

from vllm_diffusion.canvas.messages import ReportedFrame, RequestReport
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.live import CanvasFrame, CanvasStepMap, delivery, http, watch_async
from vllm_diffusion.live.frame import frame_of
from vllm_diffusion.live.http import _Chunks, _with_events
from vllm_diffusion.live.watch import MOST_WAITING_FRAMES, Inbox, OrderedQueue, open_inbox, opened
from vllm_diffusion.requests.http import BoundedPrompts

pytestmark = pytest.mark.engine


def frame(
    step: int,
    block: int = 0,
    token_ids: Sequence[int] = (),
    fields: tuple[str, ...] = (),
    tokenizer: object = None,
) -> CanvasFrame:
    """Return a frame as it is made of the engine's report."""
    tokens = np.array(token_ids, np.int32).tobytes()
    reported = ReportedFrame(block, step, 1000, False, False, 0, False, False, tokens)
    state = SimpleNamespace(
        request_index=0,
        detokenizer=IncrementalDetokenizer(),
        logprobs_processor=SimpleNamespace(tokenizer=tokenizer),
    )
    return frame_of(reported, fields, state, 0)


def test_slow_reader_misses_frames_and_nothing_else() -> None:
    """A slow reader gets the newest frames, and all step maps and tokens in order."""
    inbox = Inbox()
    for step in range(1, 1001):
        inbox.put(frame(step))
        if step % 100 == 0:
            inbox.put(CanvasStepMap(0, 0, step // 100, (1,)))
            inbox.put(answered(step))
    taken = inbox.take()
    assert [item.outputs[0].token_ids[0] for item in taken if isinstance(item, RequestOutput)] == [
        *range(100, 1001, 100)
    ]
    places = [i for i, item in enumerate(taken) if isinstance(item, CanvasFrame)]
    assert len(places) == MOST_WAITING_FRAMES
    assert min(places) == 18
    steps = [event.step for event in taken if isinstance(event, CanvasFrame)]
    assert steps == list(range(1001 - MOST_WAITING_FRAMES, 1001))
    assert sum(isinstance(event, CanvasStepMap) for event in taken) == 10
    assert inbox.take() == []


def test_prompts_are_numbered_as_they_were_named() -> None:
    """Prompts are numbered by their names if the caller names them, or else in order."""
    named = Inbox(["b", "a"])
    assert [named.prompt_index(name) for name in ("a", "b", "c")] == [1, 0, 2]


def test_an_inbox_is_its_call_alone() -> None:
    """A request that another task adds meanwhile does not use the inbox of this call."""

    async def adds() -> Inbox | None:
        await asyncio.sleep(0)
        return open_inbox()

    async def run() -> None:
        other = asyncio.ensure_future(adds())
        inbox = Inbox()
        with opened(inbox):
            mine = asyncio.ensure_future(adds())
        assert await mine is inbox
        assert await other is None
        assert open_inbox() is None

    asyncio.run(run())


def answered(block: int, *, finished: bool = False) -> RequestOutput:
    """Return an output as the output processor makes it of a canvas's tokens."""
    completion = CompletionOutput(0, f"canvas {block};", [block], None, None)
    return RequestOutput("x", None, [1], None, [completion], finished)


async def engine(rounds: Sequence[Sequence[object]], log: list[str]) -> AsyncGenerator[Any, None]:
    """Yield outputs like ``AsyncLLM.generate``, with each round whole before the reader looks."""
    inbox = open_inbox()
    assert inbox is not None
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "x")
    queue = OrderedQueue(collector, inbox)

    async def produce() -> None:
        for items in rounds:
            for item in items:
                if isinstance(item, CanvasFrame):
                    inbox.put(item)
                    queue.wake()
                else:
                    queue.put(item)  # type: ignore[arg-type]
            await asyncio.sleep(0.001)

    producing = asyncio.ensure_future(produce())
    try:
        finished = False
        while not finished:
            out = collector.get_nowait() or await collector.get()
            finished = out.finished
            yield out
    finally:
        producing.cancel()
        log.append("closed")


def rounds_of(num_canvases: int, size: int) -> list[list[object]]:
    """Return an answer's two frames per canvas and its tokens, ``size`` at a time."""
    items: list[object] = []
    for block in range(num_canvases):
        is_last = block == num_canvases - 1
        items += [frame(1, block), frame(2, block), answered(block, finished=is_last)]
    return [items[i : i + size] for i in range(0, len(items), size)]


def named(items: Iterable[object]) -> list[object]:
    return [
        (item.block, item.step) if isinstance(item, CanvasFrame) else item.outputs[0].text  # type: ignore[attr-defined]
        for item in items
    ]


async def texts(outputs: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
    """Return the stream of a server."""
    async for output in outputs:
        yield output.outputs[0].text


def watched(outputs: AsyncGenerator[Any, None], *, has_stream: bool) -> AsyncGenerator[Any, None]:
    """Return outputs and frames as Python or a client over HTTP reads them."""
    return _with_events(texts, outputs, chunks()) if has_stream else watch_async(outputs)


def chunks() -> _Chunks:
    return _Chunks({}, {}, 1, Inbox())


ORDER = [x for b in range(5) for x in ((b, 1), (b, 2), f"canvas {b};")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 15])
def test_each_canvas_is_shown_before_its_tokens_and_behind_the_last_one(size: int) -> None:
    """Each canvas is shown before its own tokens and after those of the last one."""

    async def run() -> list[object]:
        return named([item async for item in watch_async(engine(rounds_of(5, size), []))])

    assert asyncio.run(run()) == ORDER


@pytest.mark.parametrize("size", [1, 4, 15])
@pytest.mark.parametrize("withheld", [0, 1, 4])
def test_frames_have_their_place_in_a_stream(size: int, withheld: int) -> None:
    """Frames are in order in a stream that begins with other events or omits canvases."""

    async def stream(outputs: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        is_first = True
        async for output in outputs:
            if is_first:
                yield "role"
            is_first = False
            if int(output.outputs[0].token_ids[0]) >= withheld:
                yield str(output.outputs[0].text)
        yield "usage"
        yield "[DONE]"

    async def run() -> list[object]:
        events: list[object] = []
        async for event in _with_events(stream, engine(rounds_of(5, size), []), chunks()):
            if event.startswith("data: "):
                shown = json.loads(event[6:])
                events.append((shown["block"], shown["step"]))
            else:
                events.append(event)
            # A reader that is slower than the engine.
            await asyncio.sleep(0.002)
        return events

    expected = [x for x in ORDER if isinstance(x, tuple) or int(x[7]) >= withheld]
    place = ORDER.index("canvas 0;")
    expected.insert(place, "role")
    assert asyncio.run(run()) == [*expected, "usage", "[DONE]"]


@pytest.mark.parametrize("has_stream", [False, True], ids=["Python", "HTTP"])
def test_whoever_stops_watching_stops_the_request(has_stream: bool) -> None:
    """Closing the iterator of frames stops the request, as with the outputs alone."""

    async def run(num_read: int) -> list[str]:
        log: list[str] = []
        reading = watched(engine(rounds_of(5, 1), log), has_stream=has_stream)
        for _ in range(num_read):
            await anext(reading)
        await reading.aclose()
        return log

    for num_read in (1, 2, 3, 5):
        assert asyncio.run(run(num_read)) == ["closed"]


def test_a_client_that_is_gone_stops_the_request() -> None:
    """A server that cancels the task that reads the stream stops the request."""

    async def run() -> list[str]:
        log: list[str] = []
        reading = watched(engine([[frame(1)]], log), has_stream=True)
        await anext(reading)
        waiting = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return log

    assert asyncio.run(run()) == ["closed"]


@pytest.mark.parametrize("has_stream", [False, True], ids=["Python", "HTTP"])
def test_an_error_is_raised(has_stream: bool) -> None:
    """An error of the engine is raised to the watcher."""

    async def run() -> None:
        rounds = [[frame(1), answered(0)], [ValueError("gone")]]
        async for _ in watched(engine(rounds, []), has_stream=has_stream):
            pass

    with pytest.raises(ValueError, match="gone"):
        asyncio.run(run())


def test_tokens() -> None:
    """A frame has one text per position if it is requested and there is a tokenizer."""
    folder = shipped_checkpoint()
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = list(range(file.get_vocab_size()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = frame(1, 0, ids, ("tokens",), tokenizer).tokens
    assert texts is not None
    assert list(texts) == [file.decode([i], skip_special_tokens=False) for i in ids]
    assert {"<eos>", "<mask>", "<|turn>", "7", " "} <= set(texts)
    assert frame(1, 0, ids, ("token_ids", "kept"), tokenizer).tokens is None
    assert frame(1, 0, ids, ("tokens",), None).tokens is None


class Stock:
    def answer(self) -> str:
        return "stock"


class Ours(Stock):
    def answer(self) -> str:
        return f"ours of {super().answer()}"


def test_objects_keep_their_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint object keeps its identity with its new class, and a missing one stays None."""
    served = Stock()
    state: Any = SimpleNamespace(served=served, left_out=None)
    seen: list[Any] = []

    async def stock(engine_client: Any, state: Any, args: Any) -> None:
        seen.append((engine_client, state.served.answer(), args))

    monkeypatch.setattr(http, "_stream_whole_answers", lambda served: None)
    monkeypatch.setattr(http, "ENDPOINTS", dict.fromkeys(("served", "left_out", "unknown"), Ours))
    # Of a model without canvases.
    renderer = HfRenderer.__new__(HfRenderer)
    client = SimpleNamespace(model_config=SimpleNamespace(), renderer=renderer)
    asyncio.run(http._serving_canvases.make(stock)(client, state, "args"))
    assert state.served is served
    # It bounds text of every model.
    assert isinstance(renderer, BoundedPrompts)
    assert state.left_out is None
    assert not hasattr(state, "unknown")
    assert seen == [(client, "ours of stock", "args")]


def processed(
    output: EngineCoreOutput, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[RequestReport]]:
    """Return the outputs that vLLM's processor gets for one output, and the request's reports."""
    seen: list[Any] = []
    reports: list[RequestReport] = []
    state: Any = SimpleNamespace(take=lambda report, output: reports.append(report))
    monkeypatch.setattr(
        OutputProcessor, "process_outputs", lambda self, outputs: seen.extend(outputs)
    )
    processor = object.__new__(delivery.ReportingProcessor)
    processor.request_states = {output.request_id: state}
    processor.process_outputs([output])
    return seen, reports


@pytest.mark.parametrize("dtype", ["int16", "uint8"])
@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_experts_of_another_model(
    dtype: str, reason: FinishReason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's engine in the process returns the experts of its tokens unchanged."""
    experts = np.arange(12).reshape(2, 3, 2).astype(dtype)
    output = EngineCoreOutput("a", [5], routed_experts=experts, finish_reason=reason)
    seen, reports = processed(output, monkeypatch)
    assert seen == [output]
    assert seen[0].routed_experts is experts
    assert reports == []


@pytest.mark.parametrize(("tokens", "is_seen"), [([5], True), ([], False)])
def test_a_report_is_taken_out(
    tokens: list[int], is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request gets the report, and vLLM an output without it if there are tokens."""
    report = RequestReport(step_map=[1, 2])
    output = EngineCoreOutput("a", tokens, routed_experts=report.encode())
    seen, reports = processed(output, monkeypatch)
    assert reports == [report]
    assert output.routed_experts is None
    assert seen == ([output] if is_seen else [])


def test_prompt_logprobs_of_merged_answers() -> None:
    """Two answers to a prompt of which one begins later both have the prompt's log-probabilities,
    although nobody has read the outputs in between.
    """
    params = SamplingParams(n=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest("r", [5, 6], None, params, None, 0.0, None, None, None)
    request.external_req_id = "r"
    parent = ParentRequest(request)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor = OutputProcessor(None, log_stats=False)
    delivery.install()
    of_prompt = LogprobsTensors(
        torch.tensor([[6, 7]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([1])
    )
    for i in range(2):
        name, own = parent.get_child_info(i)
        child = EngineCoreRequest(name, [5, 6], None, own, None, 0.0, None, None, None)
        child.external_req_id = "r"
        processor.add_request(child, None, parent, i, queue)
    first, second = processor.request_states
    processor.process_outputs([EngineCoreOutput(first, [8], new_prompt_logprobs_tensors=of_prompt)])
    seen = queue.get_nowait()
    assert seen is not None
    assert len(seen.prompt_logprobs) == 2
    processor.process_outputs([EngineCoreOutput(first, [9])])
    processor.process_outputs(
        [EngineCoreOutput(second, [8], new_prompt_logprobs_tensors=of_prompt)]
    )
    merged = queue.get_nowait()
    assert merged is not None
    assert [one.token_ids for one in merged.outputs] == [[9], [8]]
    assert merged.prompt_logprobs == seen.prompt_logprobs
