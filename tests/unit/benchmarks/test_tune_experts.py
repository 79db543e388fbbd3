"""Tests of the tuner's search with a fake timer, and of its files in vLLM's own loader."""

import pytest
import tune_experts as tuner

# Of an H100.
SHARED = 232448


@pytest.fixture
def tuned(monkeypatch):
    """Let vLLM read tuned tiles from the folder of a file, and forget them after the test."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    def read_from(path):
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(path.parent))
        fused_moe.get_moe_configs.cache_clear()
        return fused_moe.get_moe_configs

    yield read_from
    fused_moe.get_moe_configs.cache_clear()


@pytest.mark.engine
@pytest.mark.parametrize(("dtype", "width"), [("fp8", 704), ("bf16", 352)])
def test_vllm_reads_the_file(dtype, width, tmp_path, tuned):
    """vLLM reads the file by its own name for device and shape, and finds each winner."""
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

    assert tuned(path)(131, width, experts.dtype_name) == configs
    # And takes the nearest.
    for rows, chosen in ((16, 16), (300, 256), (8192, 4096)):
        assert current(rows) == configs[chosen]
    for rows, tile in wanted.items():
        assert configs[rows]["BLOCK_SIZE_M"] == tile
        assert found[rows][1] <= found[rows][2]


@pytest.mark.engine
@pytest.mark.parametrize("which", ["wheel-h100", "tuned"])
def test_tiles_are_written_under_the_name_of_this_card(which, tmp_path, monkeypatch, tuned):
    """On any card vLLM finds the wheel's H100 tiles and the kept ones for the 26B experts."""
    import backends
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "Another_Card")
    path = backends.write_tiles(which, tmp_path / "tiles")
    assert set(tuned(path)(128, 704, "fp8_w8a8")) >= {256, 2048}
