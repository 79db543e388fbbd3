"""KV cache events for routers announce exactly the final blocks that can be found again."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from torch import Tensor
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.families.cases import LAYOUTS, checkpoint_of
from tests.support.models.prompts import prompt_of
from vllm_diffusion.cli.server import free_port

pytestmark = pytest.mark.engine

# Below a block of 16 tokens, at the end of one, beyond a window, and more than a pass holds.
LENGTHS = (5, 16, 80, 130)
NUM_TOKENS = 70
TOPIC = b"kv"


class Router:
    """What a subscriber knows of one engine's cache, from its events alone.

    Attributes:
        texts: Of a hash, the tokens up to the end of its block.
        held: Of each group of layers, the hashes of its blocks in the cache.
        windows: How many tokens a group's layers look back, or ``None``.
        block: Tokens of a block.
    """

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self.socket.bind(endpoint)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.next_number: int | None = None
        self.windows: dict[int, int | None] = {}
        self.block = 0
        self.forget()

    def forget(self) -> None:
        self.texts: dict[Any, tuple[int, ...]] = {}
        self.held: dict[int, set[Any]] = defaultdict(set)

    def listen_until(self, last: list[int]) -> list[KVCacheEvent]:
        """Return events up to the one that stores these tokens; vLLM publishes them in order."""
        heard: list[KVCacheEvent] = []
        while not any(
            isinstance(e, BlockStored) and e.token_ids[: len(last)] == last for e in heard
        ):
            assert self.socket.poll(20_000), "the events did not come"
            _, number, payload = self.socket.recv_multipart()
            count = int.from_bytes(number, "big")
            assert self.next_number in (None, count)
            self.next_number = count + 1
            batch = self.decoder.decode(payload).events
            # A group with a window names no tokens of blocks that it skips: the others name them.
            for event in sorted(
                batch, key=lambda e: getattr(e, "kv_cache_spec_sliding_window", 0) or 0
            ):
                self._note(event)
            heard += batch
        return heard

    def _note(self, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.forget()
        elif isinstance(event, BlockRemoved):
            self.held[event.group_idx] -= set(event.block_hashes)
        else:
            assert isinstance(event, BlockStored)
            assert self.block in (0, event.block_size)
            self.block = event.block_size
            window = self.windows[event.group_idx] = event.kv_cache_spec_sliding_window
            self.held[event.group_idx] |= set(event.block_hashes)
            if window is None:
                assert len(event.token_ids) == self.block * len(event.block_hashes)
                text = self.texts[event.parent_block_hash] if event.parent_block_hash else ()
                for i, one in enumerate(event.block_hashes):
                    text += tuple(event.token_ids[i * self.block : (i + 1) * self.block])
                    self.texts[one] = text

    def num_known(self, prompt: list[int], unit: int) -> int:
        """Return how many tokens of a prompt are in the cache; the last never counts."""
        hashes = {text: one for one, text in self.texts.items()}

        def is_held(group: int, window: int | None, num_tokens: int) -> bool:
            first = 0 if window is None else max(num_tokens - window + 1, 0) // self.block
            ends = range((first + 1) * self.block, num_tokens + 1, self.block)
            return all(hashes.get(tuple(prompt[:end])) in self.held[group] for end in ends)

        step = max(self.block, unit)
        return max(
            num_tokens
            for num_tokens in range(0, len(prompt), step)
            if all(is_held(group, window, num_tokens) for group, window in self.windows.items())
        )


class Subject:
    """An engine, and the router that listens to it."""

    def __init__(self, family: str, folder: Path, **options: Any) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.router = Router(endpoint)
        checkpoint, needed = checkpoint_of(family, folder)
        self.traced = TracedEngine(
            checkpoint,
            max_num_batched_tokens=128,
            kv_events_config={
                "enable_kv_cache_events": True,
                "endpoint": endpoint,
                "topic": TOPIC.decode(),
            },
            **options | needed | {"max_model_len": 256},
        )
        spec = self.traced.state.spec
        self.unit = spec.layout.alignment
        self.num_marks = 0
        # Before it has connected, vLLM's publisher drops what it has.
        while not self.router.socket.poll(100):
            self.ask([self._mark()], 1)
        self.hear()

    def close(self) -> None:
        self.traced.close()
        self.router.socket.close(linger=0)

    def _mark(self) -> list[int]:
        """Return a unique prompt: whole canvases of any family, and a few tokens."""
        self.num_marks += 1
        return prompt_of(67, self.num_marks)

    def hear(self) -> list[KVCacheEvent]:
        """Return all events until now."""
        mark = self._mark()
        self.ask([mark], 1)
        return self.router.listen_until(mark[:64])

    def ask(self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[Any]:
        params = [
            self.traced.sampling_params(
                seed=len(prompt), temperature=1.0, max_tokens=num_tokens, ignore_eos=True
            )
            for prompt in prompts
        ]
        return self.traced.outputs(prompts, params)

    def held(self) -> dict[tuple[int, Any], int]:
        """Return the block of each group and hash in the cache itself."""
        pool = self.traced.scheduler.kv_cache_manager.block_pool
        return {
            (get_group_id(key), maybe_convert_block_hash(get_block_hash(key))): block.block_id
            for block in pool.blocks
            if (key := block.block_hash) is not None
        }

    def rows(self) -> dict[tuple[int, Any], list[Tensor]]:
        """Return keys and values of those blocks, of each layer of the group."""
        layers = self.traced.runner.vllm_config.compilation_config.static_forward_context
        groups = self.traced.scheduler.kv_cache_config.kv_cache_groups
        return {
            (group, one): [
                layers[name].kv_cache[block].clone() for name in groups[group].layer_names
            ]
            for (group, one), block in self.held().items()
        }


KEEPS = {"async_scheduling": True, "prefix_cache_retention_interval": None}
SUBJECTS = [
    # By default layers with a window keep the end of a prompt only.
    pytest.param(("gemma", {}), id="synchronous", marks=pytest.mark.slow),
    pytest.param(("gemma", KEEPS), id="asynchronous"),
    *(
        pytest.param(
            (family, {"async_scheduling": is_async}), id=f"{family}-{order}", marks=pytest.mark.slow
        )
        for family in LAYOUTS
        for order, is_async in (("synchronous", False), ("asynchronous", True))
    ),
]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    family, options = request.param
    subject = Subject(family, tmp_path_factory.mktemp("model"), **options)
    yield subject
    subject.close()


def test_events(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are announced with final tokens, keys and values; the next turn finds just those."""
    router = subject.router
    assert subject.traced.llm.reset_prefix_cache()
    assert any(isinstance(event, AllBlocksCleared) for event in subject.hear())

    # What is in a block when it is announced.
    publisher = subject.traced.scheduler.kv_event_publisher
    publish = publisher.publish
    announced: dict[tuple[int, Any], list[Tensor]] = {}

    def publishing(batch: KVEventBatch) -> None:
        rows = subject.rows()
        for event in batch.events:
            assert isinstance(event, BlockStored)
            announced.update(
                {(event.group_idx, one): rows[event.group_idx, one] for one in event.block_hashes}
            )
        publish(batch)

    monkeypatch.setattr(publisher, "publish", publishing)
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = subject.ask(prompts)
    subject.hear()
    monkeypatch.undo()
    texts = [prompt + tokens for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True)]
    assert {(group, one) for group, held in router.held.items() for one in held} == set(
        subject.held()
    )
    marks = [prompt_of(67, i + 1) for i in range(subject.num_marks)]
    for known in router.texts.values():
        assert any(list(known) == text[: len(known)] for text in (*texts, *marks))

    chats = [text + prompt_of(20, 1000) for text in texts]
    expected = [router.num_known(chat, subject.unit) for chat in chats]
    # The prompt of the longest one is there in any case.
    assert expected[-1] >= LENGTHS[-1] // 32 * 32
    found = subject.ask(chats, 30)
    assert [output.num_cached_tokens for output in found] == expected

    # The same from an empty cache.
    assert subject.traced.llm.reset_prefix_cache()
    fresh = subject.ask(chats, 30)
    assert [output.num_cached_tokens for output in fresh] == [0] * len(chats)
    assert tokens_of(fresh) == tokens_of(found)
    rows = subject.rows()
    for key, row in announced.items():
        # Layers with a window may have dropped theirs, and the marks are gone.
        text = list(router.texts[key[1]])
        is_whole = router.windows[key[0]] is None and any(text == c[: len(text)] for c in chats)
        assert key in rows or not is_whole
        if key in rows:
            # Sums round by what else is in a pass; keys and values of noise differ in the first
            # digit.
            torch.testing.assert_close(row, rows[key], atol=1e-4, rtol=1e-4)
