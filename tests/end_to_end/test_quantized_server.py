"""Tests of a quantized checkpoint in ``vllm serve``, and of a damaged one that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.server import MODEL, start_server
from tests.support.models.quantized import quantized_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("scheme", "lines"),
    [
        (
            "nvfp4",
            [
                "NVFP4 linear layers: emulated in PyTorch on the CPU (weights and activations)",
                "NVFP4 experts: emulated in PyTorch on the CPU (weights and activations)",
                "4 x experts: TorchNvfp4Experts, 16 x linear: TorchNvfp4LinearKernel",
            ],
        ),
        (
            "fp8-dynamic",
            [
                "FP8 experts: emulated in PyTorch on the CPU (weights and activations)",
                "4 x experts: TorchFp8Experts, 16 x linear: TorchFp8LinearKernel",
            ],
        ),
    ],
)
def test_served(scheme: str, lines: list[str], tmp_path: Path) -> None:
    """A quantized checkpoint answers over HTTP, and the log names its layers' kernels once."""
    checkpoint = quantized_checkpoint(tmp_path / scheme, scheme)
    with start_server(checkpoint, tmp_path / "server.log") as server:
        answer = server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Add 7 and 8."}], max_tokens=32
        )
    assert answer.choices[0].message.content == "15"
    log = server.log.read_text(errors="replace")
    assert [log.count(line) for line in lines] == [1] * len(lines)


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
