"""What a pass launches besides the backbone, counted in the engine: few, and the same few for everybody.

What is counted, and as what, is in ``benchmarks/pass_launches.py``; graphs are emulated.
"""

from __future__ import annotations

from typing import Any

import bench_pass_overhead as bench
import pytest
from pass_launches import PassLaunches

pytestmark = pytest.mark.engine

MOST = 15
REQUESTS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine with the 26B's six groups of KV caches, and what counts."""
    launches = PassLaunches()
    with bench.counting_compiled("ours", launches):
        llm = bench.engine_of(bench.checkpoint(tmp_path_factory.mktemp("layers")))
        runner = bench.runner_of(llm)
        bench.watch("ours", launches, runner)
        assert len(runner.kv_cache_config.kv_cache_groups) == 6
        yield llm, launches
    llm.llm_engine.engine_core.shutdown()


def counted(served: Any, params: list[dict[str, Any]]) -> list[dict[str, int]]:
    return bench.counted(*served, params)


def test_a_plain_pass(served):
    """Passes that denoise, and passes that also encode canvases that others have finished."""
    steps = [{"extra_args": {"diffusion_max_steps": 2 + i % 2}} for i in range(REQUESTS)]
    passes = counted(served, [{}] * REQUESTS) + counted(served, steps)
    totals = [sum(counts.values()) for counts in passes]
    encodes = [counts for counts in passes if "_fill_ids" in counts]
    print(f"\nlaunches and copies of {len(passes)} passes: {totals}; {max(encodes, key=len)}")
    assert encodes
    assert len(encodes) < len(passes)
    assert max(totals) <= MOST
    assert all(counts["graph of _plain_step"] == 1 for counts in passes)
    assert all(counts["graph of _condition_canvases"] == 1 for counts in passes)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fewer_than_stock_s_class():
    """Launches, copies to the device, and the host's time in the same passes on the same platform."""
    ours, stock = (bench.overhead(side) for side in ("ours", "stock"))
    for n in map(str, bench.REQUESTS):
        for what in ("launches", "copies", "host_us"):
            print(f"{n} requests, {what}: ours {ours[n][what]}, stock {stock[n][what]}")
            assert ours[n][what] < stock[n][what]
