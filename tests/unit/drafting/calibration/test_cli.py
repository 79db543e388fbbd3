"""``vllm-diffusion calibrate``: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def steps_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of progress, without what ``transformers`` says of its own."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A target's folder, and it."""
    folder = tmp_path_factory.mktemp("target")
    target = drafts.target_model("qwen3")
    target.save_pretrained(folder)
    return folder, target


@pytest.fixture
def samples(model: tuple[Path, Any], tmp_path: Path) -> Path:
    """Greedy answers with the hidden states of ``transformers``, as extraction writes them."""
    folder, target = model
    out = tmp_path / "samples"
    out.mkdir()
    for idx in range(12):
        tokens = [3 + idx, *([5, 6, 7, 8] * 5)]
        states = drafts.features(target, tokens, list(LAYERS))
        tensors = {
            "token_ids": torch.tensor(tokens),
            "hidden_states": states.unflatten(-1, (len(LAYERS), -1)),
            "answer_start": torch.tensor(1),
        }
        save_file(tensors, out / sample_name(idx, is_held_out=idx == 0))
    write_extraction(
        out, Extraction(str(folder), LAYERS, drafts.LAYERS, drafts.HIDDEN, drafts.VOCAB)
    )
    return out


NEW = ("--layers", 1, "--block-size", 4, "--mask-token-id", drafts.MASK, "--steps", 30)


def test_train(samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From random weights, and on from there; the progress, a picture, and nothing beside the draft."""
    out = tmp_path / "drafts" / "first"
    assert run("train", samples, "--out", out, *NEW, "--learning-rate", 0.01) == 0
    said = steps_of(capsys)
    assert said[0].startswith("step 0,")
    assert "nats a masked token; held out: " in said[-1]
    assert "of 3 accepted, by position" in said[-1]
    before, after = (float(line.split("min: ")[1].split()[0]) for line in (said[0], said[-1]))
    assert after < 0.7 * before
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "training.svg",
    }
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["target_layer_ids"] == list(LAYERS)

    assert run("train", samples, "--out", tmp_path / "second", "--from", out, "--steps", 1) == 0
    again = steps_of(capsys)
    assert again[0].split("held out: ")[1] == said[-1].split("held out: ")[1]
    assert (tmp_path / "second" / "config.json").read_text() == (out / "config.json").read_text()


def test_minutes_end_the_training(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the steps that fit, at least one; the draft is saved."""
    words = (*NEW, "--steps", 10**9, "--minutes", 1e-9)
    assert run("train", samples, "--out", tmp_path / "draft", *words) == 0
    assert steps_of(capsys)[-1].startswith("step 1,")
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def test_interrupted_training_saves_nothing(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("train", "draw_training"):
        with monkeypatch.context() as patched:
            patched.setattr(calibrate, name, interrupted)
            assert run("train", samples, "--out", tmp_path / "out" / "draft", *NEW) == 130
        assert not [path for path in (tmp_path / "out").rglob("*") if (tmp_path / "out").exists()]


def test_fp8_states_are_read(samples: Path, tmp_path: Path) -> None:
    for path in samples.glob("*.safetensors"):
        tensors = load_file(path)
        tensors["hidden_states"] = tensors["hidden_states"].to(torch.float8_e4m3fn)
        save_file(tensors, path)
    assert run("train", samples, "--out", tmp_path / "draft", *NEW, "--steps", 2) == 0


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (("--layers", 1), {}, "--block-size is needed for a new draft"),
        (("--layers", 1, "--block-size", 4), {}, "--mask-token-id is needed for a new draft"),
        ((*NEW, "--block-size", 1), {}, "--block-size: 1 must be an integer of at least 2"),
        ((*NEW, "--mask-token-id", 160), {}, "mask_token_id=160 must be a token of the target's"),
        (
            (*NEW, "--mask-token-id", 5),
            {},
            "mask_token_id=5, which must be a token that no text has",
        ),
        ((*NEW, "--steps", 0), {}, "--steps: 0 must be an integer of at least 1"),
        ((*NEW, "--minutes", 0), {}, "--minutes: 0 must be a number above 0"),
        (
            (*NEW, "--target", "/no/target"),
            {},
            "--target: /no/target must be the folder of a check",
        ),
        (("--from", "/no/draft"), {}, "--from: /no/draft must be the folder of a draft; it has no"),
        (NEW, {"hidden_size": 128}, "with hidden_size=128, and --target has 64; give the target"),
        (NEW, {"vocab_size": 99}, "with vocab_size=99, and --target has 160"),
        (NEW, {"num_target_layers": 9}, "with num_hidden_layers=9, and --target has 4"),
        (NEW, {"target_layer_ids": None}, "does not say what was extracted"),
        (
            NEW,
            {"target_layer_ids": [0, 1, 2]},
            "has hidden_states of .* extract its target_layer_ids",
        ),
    ],
)
def test_refused_training(
    words: tuple[object, ...],
    changes: dict[str, Any],
    message: str,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edited(samples / "extraction.json", **changes)
    # A value is refused before torch is imported, what the files hold when they are read.
    refused = 2 if message.startswith("--") else 1
    assert run("train", samples, "--out", tmp_path / "draft", *words) == refused
    (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert re.search(message, said), said
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 161}, "vocab_size=161 is not the target's 160"),
        ({"num_target_layers": 5}, "num_target_layers=5, but the target has 4 layers"),
        (
            {"dflash_config": {"mask_token_id": 160, "target_layer_ids": [0, 1]}},
            "mask_token_id=160",
        ),
        (
            {"dflash_config": {"mask_token_id": drafts.MASK, "target_layer_ids": [0, 2]}},
            r"hold the layers \[0, 1\], and the draft's target_layer_ids are \[0, 2\]",
        ),
        ({"hidden_size": 32}, "cannot be read"),
    ],
)
def test_draft_of_another_target(
    changes: dict[str, Any],
    message: str,
    samples: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = drafts.save_draft(tmp_path / "first")
    edited(first / "config.json", **changes)
    assert run("train", samples, "--out", tmp_path / "draft", "--from", first) == 1
    assert re.search(message, capsys.readouterr().err)


def test_refused_otherwise(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is there, options of a new draft for another, no GPU, files that are none."""
    first = drafts.save_draft(tmp_path / "first")
    out = tmp_path / "draft"
    for words, message in (
        (("--out", first, "--from", first), "is there already; name a new folder"),
        (("--out", out, "--from", first, "--block-size", 8), "--block-size is of a new draft"),
        (
            ("--out", out, "--from", first, "--device", "cuda"),
            "--device: cuda: this machine has no such GPU",
        ),
    ):
        if "cuda" in words and torch.cuda.is_available():
            continue
        assert run("train", samples, *words) == 2
        assert message in capsys.readouterr().err
    (samples / sample_name(3, is_held_out=False)).write_bytes(b"none")
    assert run("train", samples, "--out", out, "--from", first) == 1
    assert "sample-0000003.safetensors cannot be read" in capsys.readouterr().err
    for path in samples.glob("sample-*"):
        path.unlink()
    assert run("train", samples, "--out", out, "--from", first) == 1
    assert "all of 1 samples are held out; record more" in capsys.readouterr().err


def test_refused_extraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before vLLM is even imported."""
    own = tmp_path / "own.jsonl"
    (tmp_path / "config.json").write_text("{}")
    for content, words, message in (
        ("", ("--layer-ids", "0"), "holds no exchange; record some first"),
        (
            '{"a": 1}',
            ("--layer-ids", "0"),
            "line 1: prompt_token_ids is missing; a line has prompt_token_ids and",
        ),
        ('{"token_ids": [1, 2]}', ("--layer-ids", "a"), "--layer-ids: a must be ascending numbers"),
        (
            '{"token_ids": [1, 2]}',
            ("--draft", tmp_path),
            "nothing of dflash_config.target_layer_ids",
        ),
    ):
        own.write_text(content)
        assert run("extract", "target", own, "--out", tmp_path / "out", *words) == 2
        assert message in capsys.readouterr().err
