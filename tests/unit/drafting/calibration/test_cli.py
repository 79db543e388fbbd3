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


NEW = ("--layers", 1, "--block-size", 4, "--mask-token-id", drafts.MASK, "--steps", 30)


def test_train(train: Any) -> None:
    """From random weights, and on from there; the progress, a picture, and nothing beside the draft."""
    out = Path("drafts/first")
    status, lines = train("--out", out, *NEW, "--learning-rate", 0.01)
    assert status == 0
    # Without what ``transformers`` says of its own.
    said = [line for line in lines if line.startswith("step")]
    assert said[0].startswith("step 0,")
    assert "nats a masked token; held out: " in said[-1]
    assert "of 3 accepted, by position" in said[-1]
    before, after = (float(line.split("min: ")[1].split()[0]) for line in (said[0], said[-1]))
    assert after < 0.7 * before
    files = {"config.json", "model.safetensors", "training.svg"}
    assert {path.name for path in out.iterdir()} == files
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == list(LAYERS)

    status, lines = train("--out", "second", "--from", out, "--steps", 1)
    assert status == 0
    again = next(line for line in lines if line.startswith("step"))
    assert again.split("held out: ")[1] == said[-1].split("held out: ")[1]
    assert Path("second/config.json").read_text() == (out / "config.json").read_text()


def test_minutes_end_the_training(train: Any) -> None:
    """After the steps that fit, at least one; the draft is saved."""
    status, lines = train(*NEW, "--steps", 10**9, "--minutes", 1e-9)
    assert status == 0
    assert lines[-1].startswith("step 1,")
    assert Path("draft/model.safetensors").is_file()


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
        (("--layers", 1), {}, "--block-size is needed for a new draft"),
        (("--layers", 1, "--block-size", 4), {}, "--mask-token-id is needed for a new draft"),
        ((*NEW, "--mask-token-id", 160), {}, "mask_token_id=160 must be a token of the target's"),
        ((*NEW, "--mask-token-id", 5), {}, "id=5, which must be a token that no text has"),
        ((*NEW, "--minutes", 0), {}, "--minutes=0.0 must be a number above 0"),
        (
            (*NEW, "--target", "/no/one"),
            {},
            "--target: '/no/one' must be a folder with config.json",
        ),
        (("--from", "/no/draft"), {}, "--from: '/no/draft' must be a folder with config.json"),
        ((*OLD, "--out", "target"), {}, "out: target is there already; name a new folder"),
        ((*OLD, "--block-size", 8), {}, "--block-size is of a new draft"),
        pytest.param(
            (*OLD, "--device", "cuda"),
            {},
            "device cuda: Found no NVIDIA driver",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        # What files hold is another's: the extraction's, or the draft's.
        (NEW, {"samples": {"hidden_size": 128}}, "=128, and --target has 64; give the target"),
        (NEW, {"samples": {"vocab_size": 99}}, "with vocab_size=99, and --target has 160"),
        (NEW, {"samples": {"num_target_layers": 9}}, "_layers=9, and --target has 4"),
        (NEW, {"samples": {"target_layer_ids": None}}, "does not say what was extracted"),
        (
            NEW,
            {"samples": {"target_layer_ids": [0, 1, 2]}},
            "has hidden_states of .* extract its target_layer_ids",
        ),
        (OLD, {"old": {"vocab_size": 161}}, "vocab_size=161 is not the target's 160"),
        (
            OLD,
            {"old": {"hidden_size": 32}},
            "^--from old .*is not a draft of its .* size mismatch for",
        ),
        (
            OLD,
            {"old": {"dflash_config": {"mask_token_id": drafts.MASK, "target_layer_ids": [0, 2]}}},
            r"hold the layers \[0, 1\], and the draft's target_layer_ids are \[0, 2\]",
        ),
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
    # A value is refused before torch is imported, what the files hold when they are read.
    assert status == (2 if message.startswith("--") else 1)
    assert any(re.search(message, line) for line in lines), lines
    assert not Path("draft").exists()
