"""``vllm-diffusion calibrate``: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from tests.support import drafts
from tests.support.commands import status_of
from vllm_diffusion.drafting.calibration import calibrate
from vllm_diffusion.drafting.calibration.samples import Extraction, sample_name, write_extraction
from vllm_diffusion.drafting.recording import Recorder, Ring

LAYERS = (0, 1)


def run(*words: object) -> int:
    return status_of("calibrate", *words)


def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is there, and the command that records there; then nothing any more."""
    folder = tmp_path / "re cording"
    recorder = Recorder(Ring(folder, "engine0", 2**20), pytest.fail)
    for i in range(30):
        recorder.add([i, 1, 2], [3, 4])
    recorder.close()
    with (folder / "engine0-00000000.jsonl").open("a") as file:
        file.write('{"prompt')
    assert run("record", folder, "--max-mib", 3) == 0
    printed = capsys.readouterr().out
    assert "30 exchanges from 20" in printed
    assert "90 tokens of prompts, 60 of answers" in printed
    assert "1 half-written lines were passed over" in printed
    words = shlex.split(printed.splitlines()[-1])
    settings = json.loads(words[words.index("--additional-config") + 1])
    assert settings == {"drafting": {"record": {"folder": str(folder), "max_mib": 3}}}

    assert run("record", folder, "--clear") == 0
    assert run("record", folder) == 0
    assert "holds no exchange" in capsys.readouterr().out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, and greedy answers with hidden states, as extraction writes them."""
    folder = tmp_path_factory.mktemp("training")
    target = drafts.target_model("qwen3")
    target.save_pretrained(folder / "target")
    drafts.save_draft(folder / "old")
    samples = folder / "samples"
    samples.mkdir()
    for idx in range(12):
        tokens = [3 + idx, *([5, 6, 7, 8] * 5)]
        states = drafts.features(target, tokens, list(LAYERS))
        tensors = {
            "token_ids": torch.tensor(tokens),
            "hidden_states": states.unflatten(-1, (len(LAYERS), -1)),
            "answer_start": torch.tensor(1),
        }
        save_file(tensors, samples / sample_name(idx, is_held_out=idx == 0))
    shape = (drafts.LAYERS, drafts.HIDDEN, drafts.VOCAB)
    write_extraction(samples, Extraction(str(folder / "target"), LAYERS, *shape))
    return folder


@pytest.fixture
def train(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, list[str]]]:
    """Trains ``draft`` in a copy of that folder; the exit status, and lines of errors and progress."""
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "here"))

    def run_here(*words: object) -> tuple[int, list[str]]:
        status = run("train", "samples", "--out", "draft", *words)
        return status, capsys.readouterr().err.strip().splitlines()

    return run_here


NEW = ("--layers", 1, "--block-size", 4, "--mask-token-id", drafts.MASK)


def test_train(train: Any) -> None:
    """From random weights, until the minutes end; the progress, a picture, and nothing beside the draft."""
    out = Path("drafts/first")
    status, lines = train("--out", out, *NEW, "--steps", 10**9, "--minutes", 1e-9)
    assert status == 0
    assert lines[-1].startswith("step 1,")
    assert "of 3 accepted, by position" in lines[-1]
    files = {"config.json", "model.safetensors", "training.svg"}
    assert {path.name for path in out.iterdir()} == files
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == list(LAYERS)


@pytest.mark.parametrize("interrupted", ["train", "draw_training"])
def test_interrupted_training_saves_nothing(
    interrupted: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, interrupted, mock.Mock(side_effect=KeyboardInterrupt))
    assert train("--out", "out/draft", *NEW, "--steps", 2)[0] == 130
    assert not list(Path("out").rglob("*"))


OLD = ("--from", "old")


@pytest.mark.parametrize(
    ("words", "files", "message"),
    [
        ((*NEW, "--mask-token-id", 160), {}, "mask_token_id=160 must be a token of the target's"),
        ((*NEW, "--mask-token-id", 5), {}, "id=5, which must be a token that no text has"),
        ((*OLD, "--out", "target"), {}, "out: target is there already; name a new folder"),
        ((*OLD, "--device", "nope"), {}, "device nope: Expected one of cpu, cuda"),
        # What files hold is another's: the extraction's, or the draft's.
        (NEW, {"samples": {"hidden_size": 128}}, "=128, and --target has 64; give the target"),
        (NEW, {"samples": {"target_layer_ids": None}}, "does not say what was extracted"),
        (NEW, {"samples": {"target_layer_ids": [0, 1, 2]}}, "extract its target_layer_ids"),
        (OLD, {"old": {"vocab_size": 161}}, "vocab_size=161 is not the target's 160"),
        (OLD, {"old": {"hidden_size": 32}}, "is not a draft of its .* size mismatch for"),
        (OLD, {"samples": {"target_layer_ids": [0, 2]}}, "the draft's target_layer_ids are "),
    ],
)
def test_refused_training(
    words: tuple[object, ...], files: dict[str, Any], message: str, train: Any
) -> None:
    """By the option or the field, and nothing is saved."""
    for folder, changes in files.items():
        name = "extraction.json" if folder == "samples" else "config.json"
        path = Path(folder, name)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    status, lines = train(*words)
    assert status == 1
    assert any(re.search(message, line) for line in lines), lines
    assert not Path("draft").exists()
