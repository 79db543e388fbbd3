"""Tests of the passes that the scheduler composes for prompts of realistic length."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.vllm_configs import configure
from tests.support.families.cases import checkpoint_of

pytestmark = pytest.mark.engine

PROMPT, MODEL, BUDGET = 122_000, 131_072, 16_384
BLOCK_SIZE = 32


class Scheduled:
    """A scheduler without an engine, in which no pass converges or is computed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = configure(
            folder,
            skip_tokenizer_init=True,
            max_model_len=MODEL,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=8,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
            **options,
        )
        num_blocks = 4 * MODEL // BLOCK_SIZE
        config.cache_config.num_gpu_blocks = num_blocks
        attention = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=config.model_config.dtype
        )
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)])
        self.canvas: int = config.model_config.diffusion.spec.length
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def add(self, name: str, num_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=64)
        self.scheduler.add_request(Request(name, [7] * num_tokens, params, None))

    def passes(self) -> Iterator[dict[str, int]]:
        """Compose passes, as rows by request, until the prompt named "long" is computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        while True:
            output = self.scheduler.schedule()
            rows = output.num_scheduled_tokens
            names = list(rows)
            yield rows
            self.scheduler.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[[] for _ in names],
                ),
            )
            if (
                self.scheduler.requests["long"].num_computed_tokens
                >= PROMPT // self.canvas * self.canvas
            ):
                return


@pytest.fixture(params=["llada2.2", "sdar", "diffusion_gemma"])
def folder(request, tmp_path, monkeypatch):
    # The tiny models know fewer positions, and none of theirs is computed here.
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    return checkpoint_of(request.param, tmp_path)[0]


def test_whole_blocks_up_to_the_budget(folder):
    """A prompt of 122,000 tokens takes eight passes of 16,384, not one per block."""
    scheduled = Scheduled(folder)
    scheduled.add("long", PROMPT)
    rows = [each["long"] for each in scheduled.passes()]
    assert len(rows) == 8
    assert rows[:7] == [BUDGET] * 7


def test_canvases_keep_coming(folder):
    """Requests that were there before lose no pass to a long prompt."""
    scheduled = Scheduled(folder)
    for name in ("first", "second"):
        scheduled.add(name, scheduled.canvas)
    passes = scheduled.passes()
    next(passes)
    scheduled.add("long", PROMPT)
    for rows in passes:
        assert rows["first"] == rows["second"] == scheduled.canvas
        assert sum(rows.values()) <= BUDGET


def test_a_share_is_set_aside(folder):
    """With vLLM's threshold, later requests do not wait for the end of a long prompt."""
    scheduled = Scheduled(folder, long_prefill_token_threshold=BUDGET // 2)
    scheduled.add("long", PROMPT)
    passes = scheduled.passes()
    # Nobody else is there yet.
    assert next(passes) == {"long": BUDGET}
    scheduled.add("late", scheduled.canvas)
    # Longer than that no canvas takes.
    for rows in islice(passes, 8):
        assert rows["late"] >= scheduled.canvas
        assert rows["long"] == BUDGET // 2
