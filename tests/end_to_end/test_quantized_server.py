"""A damaged quantized checkpoint in ``vllm serve``, which the engine's process refuses."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.server import start_server
from tests.support.models.quantized import quantized_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_bad_checkpoint_is_refused(tmp_path: Path) -> None:
    """``vllm serve`` ends while loading, with the tensor and the file in its last line."""
    checkpoint = quantized_checkpoint(tmp_path / "fp8", "fp8-dynamic")
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.decoder.layers.1.experts.2.up_proj.weight_scale"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError) as raised:
        start_server(checkpoint, tmp_path / "server.log")
    message = str(raised.value)
    assert name in message
    assert str(checkpoint / "model.safetensors") in message
