"""The tuner's search with a timer of the test's, and its files as vLLM's own loader reads them."""

from __future__ import annotations

import math

import pytest
import tune_experts as tuner
from hypothesis import given
from hypothesis import strategies as st

# Of an H100.
SHARED = 232448
BASELINE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "SPLIT_K": 1,
    "num_warps": 4,
    "num_stages": 3,
}

experts_of = st.builds(
    tuner.Experts,
    num_experts=st.just(128),
    width=st.sampled_from([704, 352, 176]),
    hidden_size=st.just(2816),
    top_k=st.just(8),
    dtype=st.sampled_from(["fp8", "bf16"]),
)
# Seconds for each value of each axis: their product is a configuration's time.
costs_of = st.fixed_dictionaries(
    {axis: st.tuples(*[st.floats(1.0, 2.0)] * len(values)) for axis, values in tuner.AXES.items()}
)


def seconds_of(costs: dict[str, tuple[float, ...]], config: dict[str, int]) -> float:
    return math.prod(costs[axis][values.index(config[axis])] for axis, values in tuner.AXES.items())


@given(experts=experts_of, costs=costs_of, rows=st.sampled_from(tuner.ROWS))
def test_search_ends_where_no_neighbour_is_faster(experts, costs, rows):
    """Only sensible configurations are tried; what is kept is vLLM's choice or clearly faster."""
    tried = []

    def time_of(config):
        tried.append(config)
        return seconds_of(costs, config)

    def is_allowed(config):
        return tuner.is_sensible(config, experts, rows, SHARED)

    best, seconds = tuner.search([BASELINE], time_of, is_allowed)
    assert seconds == seconds_of(costs, best)
    assert best == BASELINE or seconds < tuner.GAIN * seconds_of(costs, BASELINE)
    assert all(is_allowed(config) or config == BASELINE for config in tried)
    assert len(tried) == len({tuple(sorted(config.items())) for config in tried})
    for config in tuner.neighbours(best):
        assert not is_allowed(config) or seconds_of(costs, config) >= tuner.GAIN * seconds
    # What the search does not vary is as it was.
    assert best.keys() == BASELINE.keys()
    assert best["SPLIT_K"] == 1


def test_search_passes_over_what_cannot_run():
    """A configuration that the GPU has no room for is never the winner."""

    def time_of(config):
        return math.inf if config["num_stages"] > 3 else 1.0 / config["num_stages"]

    best, seconds = tuner.search([BASELINE | {"num_stages": 5}], time_of, lambda config: True)
    assert best["num_stages"] == 3
    assert seconds == 1.0 / 3


@pytest.mark.engine
@pytest.mark.parametrize(("dtype", "width"), [("fp8", 704), ("bf16", 352), ("fp8", 176)])
def test_vllm_reads_the_file(dtype, width, tmp_path, monkeypatch):
    """By its own name for the device and the shape, and for each number of rows the winner."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    # A shape that vLLM ships no file for on any device.
    experts = tuner.Experts(131, width, 2816, 8, dtype)
    current = tuner.current_choice(experts)
    wanted = {256: 64, 1024: 128, 4096: 128}

    def timer(rows, config):
        return 1.0 + abs(config["BLOCK_SIZE_M"] - wanted[rows]) + config["num_warps"] / 100

    found = tuner.tune(experts, tuple(wanted), timer, current, SHARED)
    configs = {rows: best for rows, (best, _, _) in found.items()} | {16: current(16)}
    path = tuner.write(tmp_path / "tuned", experts, configs)
    assert f"E=131,N={width}," in path.name
    assert ("dtype=fp8_w8a8" in path.name) == (dtype == "fp8")

    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(path.parent))
    fused_moe.get_moe_configs.cache_clear()
    try:
        assert fused_moe.get_moe_configs(131, width, experts.dtype_name) == configs
        # And takes the nearest.
        for rows, chosen in ((16, 16), (300, 256), (8192, 4096)):
            assert current(rows) == configs[chosen]
        for rows, tile in wanted.items():
            assert configs[rows]["BLOCK_SIZE_M"] == tile
            assert found[rows][1] <= found[rows][2]
    finally:
        fused_moe.get_moe_configs.cache_clear()


def test_needs_a_gpu(monkeypatch, capsys):
    """It says so, and measures nothing."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tuner.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
