"""Hidden states from vLLM's own extraction are those of ``transformers``; what it cannot give is
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.engines.draft_engine import prompt_of, saved_target
from tests.support.models import drafts
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.drafting.calibration.extract import extract
from vllm_diffusion.drafting.recording import read_recording

pytestmark = [pytest.mark.engine]

LAYERS = [0, 2]
# Longer than what is computed at once.
EXCHANGES = [(prompt_of(n, seed=n), prompt_of(m, seed=m)) for n, m in ((1, 2), (40, 1), (90, 81))]


def recorded(path: Path) -> Path:
    lines = [
        json.dumps({"prompt_token_ids": prompt, "output_token_ids": output})
        for prompt, output in EXCHANGES
    ]
    path.write_text("\n".join(lines))
    return path


def extracted(
    target: str | Path, recording: Path, out: Path, *options: str, layers: list[int] = LAYERS
) -> None:
    exchanges = read_recording(recording).exchanges
    extract([str(target), *options], exchanges, layers, out, 2**30, 4096)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_states(cache: str, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extraction writes one sample for each exchange, with the target's hidden states in full
    precision, also with an FP8 KV cache.
    """
    # The extraction sets it for its own process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    recording = recorded(tmp_path / "own.jsonl")
    options = ("--max-model-len", "256", "--kv-cache-dtype", cache)
    options += ("--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    extracted(saved_target(tmp_path), recording, tmp_path / "samples", *options)
    files = list((tmp_path / "samples").iterdir())
    assert len(files) == len(EXCHANGES)
    found = {}
    for path in files:
        tensors = load_file(path)
        found[tuple(tensors["token_ids"].tolist())] = tensors
    for prompt, output in EXCHANGES:
        tensors = found[tuple(prompt + output)]
        assert int(tensors["answer_start"]) == len(prompt)
        expected = drafts.features(models["qwen3"], prompt + output, LAYERS)
        states = tensors["hidden_states"].flatten(1)
        assert states.dtype == expected.dtype
        # The first layer's attention already reads coarse keys and values from an FP8 cache.
        tolerance = 1e-5 if cache == "auto" else 0.2
        error = (states - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        if cache == "fp8" and len(prompt) > 1:
            assert error > 1e-4


@pytest.mark.parametrize(
    ("words", "layers", "message"),
    [
        (
            ("--kv-cache-dtype", "turboquant_k8v4"),
            [0],
            "--kv-cache-dtype turboquant_k8v4: a draft would learn",
        ),
        ((), [0, 3], r"target_layer_ids=\[0, 3\] must be layers of the target, 0 to 2"),
        (
            ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'),
            [0],
            "--kv-transfer-config is set by the extr",
        ),
    ],
)
def test_refused(words: tuple[str, ...], layers: list[int], message: str, tmp_path: Path) -> None:
    """An extraction that cannot be done is refused before anything is loaded or written."""
    target, own = saved_target(tmp_path), recorded(tmp_path / "own.jsonl")
    with pytest.raises(ValueError, match=message):
        extracted(target, own, tmp_path / "out", *words, layers=layers)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_refused_targets(tmp_path: Path) -> None:
    """The extraction refuses a diffusion model, and a recording of another target."""
    target = saved_target(tmp_path)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"token_ids": [1, drafts.VOCAB]}))
    for model, message in (
        (SHIPPED, "is a diffusion model"),
        (target, "has token 160, outside the target's"),
    ):
        with pytest.raises(ValueError, match=message):
            extracted(model, own, tmp_path / "out", layers=[0])
