"""``vllm-diffusion calibrate``: what it prints, and what it refuses in one sentence."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engines.commands import status_of
from tests.support.models import drafts
from vllm_diffusion.drafting.calibration import calibrate
from vllm_diffusion.drafting.calibration.samples import sample_name
from vllm_diffusion.drafting.commands import train_draft

LAYERS = (0, 1)


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
    (folder / "recording.jsonl").write_text('{"token_ids": [3, 4]}')
    return folder


@pytest.fixture
def train(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, list[str]]]:
    """Run ``calibrate train`` in a copy of that folder; gives the exit status, and lines of errors
    and progress.
    """
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "here"))

    class Pool(ThreadPoolExecutor):
        """Copies the samples instead of starting a process that extracts them."""

        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(1)

        def submit(self, _: object, *arguments: Any) -> Future[Any]:
            return super().submit(shutil.copytree, "samples", arguments[3])

    monkeypatch.setattr(train_draft, "ProcessPoolExecutor", Pool)

    def run_here(*words: object) -> tuple[int, list[str]]:
        words = ("target", "recording.jsonl", "--from", "old", "--out", "draft", *words)
        status = status_of("calibrate", "train", *words)
        return status, capsys.readouterr().err.strip().splitlines()

    return run_here


@pytest.fixture
def slow_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the extraction seem to take 40 s; from then on each look at the clock adds a second."""
    seconds = itertools.count(40)
    clock = type("Clock", (), {"seconds": property(lambda _: float(next(seconds)))})
    monkeypatch.setattr(train_draft, "RunningTime", clock)


@pytest.mark.usefixtures("slow_extraction")
def test_train(train: Any) -> None:
    """Training ends before the command's minutes are over, prints progress and a comparison, and
    leaves only the draft, a picture and the comparison's figures.
    """
    out = Path("drafts/first")
    status, lines = train("--out", out, "--steps", 10**9, "--minutes", 1)
    assert status == 0
    # Seven tenths of the 20 s that are left.
    assert lines[-2].startswith("step 13,")
    assert "accepted, by position" in lines[-2]
    assert re.match(
        r"On held-out answers: 1\.\d\d tokens a verification, and 1\.\d\d of", lines[-1]
    )
    files = {"config.json", "model.safetensors", "training.svg", "comparison.json"}
    assert {path.name for path in out.iterdir()} == files
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    config = json.loads((out / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == list(LAYERS)
    assert not json.loads((out / "comparison.json").read_text())["is_better"]


@pytest.mark.usefixtures("slow_extraction")
def test_no_time_left(train: Any) -> None:
    """A command whose minutes are over after the extraction reports it, and saves nothing."""
    status, lines = train("--minutes", 0.5)
    assert status == 1
    assert lines[-1] == "--minutes=0.5: the extraction used all of them; raise it."
    assert not Path("draft").exists()


def test_running_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in which the process is halted counts as five seconds, the most that a tick may take
    on a busy machine.
    """
    now = iter([0.0, 0.5, 1.0, 3601.0, 3601.5])
    fake = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(now))
    monkeypatch.setattr(train_draft, "time", fake)
    clock = object.__new__(train_draft.RunningTime)
    clock.seconds = 0.0
    with pytest.raises(StopIteration):
        clock._tick()
    assert clock.seconds == 6.5


@pytest.mark.parametrize("interrupted", ["train", "draw_training"])
def test_interrupted_training_saves_nothing(
    interrupted: str, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a training gives status 130 and leaves no file."""
    monkeypatch.setattr(calibrate, interrupted, mock.Mock(side_effect=KeyboardInterrupt))
    assert train("--out", "out/draft", "--steps", 2)[0] == 130
    assert not list(Path("out").rglob("*"))


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (("--out", "target"), {}, "out: target already exists; name a new folder"),
        (("--device", "nope"), {}, "device nope: Expected one of cpu, cuda"),
        (("--device", "cuda:99"), {}, "device cuda:99: torch finds no such GPU"),
        ((), {"mask_token_id": 5}, "id=5, which must be a token that no text has"),
        ((), {"vocab_size": 161}, "vocab_size=161 is not the target's 160"),
        ((), {"hidden_size": 32}, "is not a draft of its .* size mismatch for"),
        ((), {"target_layer_ids": "0"}, "has no dflash_config.target_layer_ids"),
    ],
)
def test_refused_training(
    words: tuple[object, ...], changes: dict[str, Any], message: str, train: Any
) -> None:
    """A training that cannot run is refused with the name of the option or the field, and nothing
    is saved.
    """
    path = Path("old/config.json")
    config = json.loads(path.read_text())
    for name, value in changes.items():
        (config["dflash_config"] if name in config["dflash_config"] else config)[name] = value
    path.write_text(json.dumps(config))
    status, lines = train(*words)
    assert status in (1, 2)
    assert any(re.search(message, line) for line in lines), lines
    assert not Path("draft").exists()
