"""Hidden states through vLLM's own extraction: those of ``transformers``, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import drafts
from tests.support.checkpoints import SHIPPED
from tests.support.commands import status_of
from tests.support.draft_engine import prompt_of, saved_target
from vllm_diffusion.drafting.calibration.samples import read_extraction

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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_states(cache: str, models: Any, tmp_path: Path) -> None:
    """One sample of each exchange, as the target read it; in full precision behind any cache."""
    target = saved_target(tmp_path)
    words = ["calibrate", "extract", target, recorded(tmp_path / "own.jsonl"), "--layer-ids", "0,2"]
    words += ["--out", tmp_path / "samples", "--max-model-len", "256", "--kv-cache-dtype", cache]
    words += ["--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "vllm_diffusion.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("3 samples, 215 tokens, 0.1 MiB")
    assert read_extraction(tmp_path / "samples").target_layer_ids == tuple(LAYERS)
    files = list((tmp_path / "samples").iterdir())
    assert len(files) == len(EXCHANGES) + 1
    found = {}
    for path in files:
        if path.suffix == ".safetensors":
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
    ("words", "message"),
    [
        (
            ("--kv-cache-dtype", "turboquant_k8v4"),
            "--kv-cache-dtype turboquant_k8v4: hidden states",
        ),
        (("--layer-ids", "0,3"), r"target_layer_ids=[0, 3] must be layers of the target, 0 to 2"),
        (
            ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'),
            "--kv-transfer-config is set by the extr",
        ),
    ],
)
def test_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is loaded or written."""
    target = saved_target(tmp_path)
    own = recorded(tmp_path / "own.jsonl")
    out = tmp_path / "out"
    capsys.readouterr()
    layers = () if "--layer-ids" in words else ("--layer-ids", "0")
    words = ("extract", str(target), str(own), "--out", str(out), *layers, *words)
    assert status_of("calibrate", *words) == 1
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not out.exists()


@pytest.mark.slow
def test_refused_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A diffusion model; another target's recording; a folder with something in it."""
    target = saved_target(tmp_path)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"token_ids": [1, drafts.VOCAB]}))
    elsewhere = tmp_path / "out"
    for model, out, message in (
        (SHIPPED, elsewhere, "is a diffusion model"),
        (target, elsewhere, "has token 160, and the target's"),
        (target, tmp_path, "is not empty; name a new folder"),
    ):
        words = (model, own, "--out", out, "--layer-ids", "0")
        assert status_of("calibrate", "extract", *words) == 1
        assert message in capsys.readouterr().err
