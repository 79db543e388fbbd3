"""``vllm-diffusion bench-drafts``, ``calibrate compare`` and ``collect``, with fake servers where vLLM's would be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_server
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.drafting.commands import contenders, draft_runs
from vllm_diffusion.drafting.recording import read_recording

METHODS = ("drafts", "dies", "breaks", "drafts-otherwise")
ONCE = ("--rounds", "1", "--concurrency", "1")
DATA = """\
{"task": "talk", "messages": [{"role": "user", "content": "One?"}]}
{"task": "talk", "messages": [{"role": "user", "content": "Hello"}]}
{"task": "text", "prompt": [5, 6]}
"""


class Bench:
    """Runs commands whose servers are fake.

    Attributes:
        behaviours: Of servers, by the name of their draft's folder or by their method, which stands for
            itself where nothing is here.
        served: Options that each server got.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.behaviours: dict[str, str] = {}
        self.served: list[tuple[str, ...]] = []

    def serve(self, _: str, *options: str) -> list[str]:
        self.served.append(options)
        name = "plain"
        if "--speculative-config" in options:
            spec = json.loads(options[options.index("--speculative-config") + 1])
            name = Path(spec.get("model", spec["method"])).name
        return fake_server.command(self.behaviours.get(name, name))

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        status = status_of(*arguments)
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err

    def methods(self, *arguments: object) -> tuple[int, str, str]:
        return self("bench-drafts", "model", "--data", "data.jsonl", "--method", *arguments)


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    made = Bench(capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(contenders, "METHODS", METHODS)
    monkeypatch.setattr(contenders, "_WITHOUT_A_DRAFT", METHODS)
    monkeypatch.setattr(draft_runs, "vllm_serve", made.serve)
    Path("data.jsonl").write_text(DATA)
    return made


def test_bench(bench: Bench, tmp_path: Path) -> None:
    """Figures of the servers' counters, and reasons where there are none; nobody else is harmed."""
    options = ("--rounds", "2", "--concurrency", "1", "3", "--json", "out.json")
    status, out, err = bench.methods(*METHODS, *options)
    assert status == 1
    assert "Traceback" not in err
    written = json.loads(Path("out.json").read_text())["results"]
    by_name = {each["contender"]["name"]: each for each in written}
    assert list(by_name) == ["no draft", *METHODS]
    for name, each in by_name.items():
        assert bool(each["failure"]) is (name in ("dies", "breaks"))
        if not each["failure"]:
            # Two tasks, with two loads, in each of two rounds.
            assert len(each["rounds"]) == 8
            assert sum(one["counted"]["tokens"] for one in each["rounds"]) == 4 * 3 * 10
    # Each answer has one verification that kept three, and one that kept all four.
    counted = by_name["drafts"]["rounds"][0]["counted"]["verifications"]
    assert counted == {"number": 4, "accepted": [4, 4, 4, 2]}
    for pattern, times in (
        (r"^1 at a time\n  draft +tokens/s .* same tokens\n  no draft +[\d.]+ +1\.00 ", 1),
        (r"^  no draft .* 250\.0 +- +yes$", 2),
        (r"^  task +talk +text\n  drafts +[\d.]+ +[\d.]+\n  drafts-otherwise ", 2),
        # The first error of a log is the reason, without who said it.
        (r"^dies: no figures\. RuntimeError: first \(log: \S+\.log\)$", 1),
        (r"^breaks: no figures\. \w+: The server refused the request: too long", 1),
        (r"^  drafts +[\d.]+ .* 4\.50 +yes$", 2),
        (r"^  drafts-otherwise .* NO$", 2),
        (r"^  position +1 +2 +3 +4\n  drafts +100 +100 +100 +50$", 1),
        (r"^  task +talk +text\n  drafts +4\.50 +4\.50$", 1),
    ):
        assert len(re.findall(pattern, out, re.M)) == times, (pattern, out)
    # The server of each that was started is gone, and has left no log but of what failed.
    assert len(list(tmp_path.glob("*.log"))) == 1


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Starts servers that no command starts or stops; returns the address of each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with ExitStack() as stack:

        def start(behaviour: str) -> str:
            command = fake_server.command(behaviour)
            return stack.enter_context(server.Server(command, report=lambda _: None)).url

        yield start


def record(num_exchanges: int) -> None:
    """Write a recording in which every prompt came twice."""
    Path("recording").mkdir()
    exchange = {"output_token_ids": [3]}
    lines = [
        json.dumps(exchange | {"prompt_token_ids": [n, n + 1], "time": time})
        for time, n in enumerate([*range(1, 1 + num_exchanges)] * 2)
    ]
    Path("recording/a.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("kinds", [("worse", "drafts"), ("drafts", "worse"), ("drafts", "drafts")])
def test_compare(kinds: tuple[str, str], bench: Bench) -> None:
    """Held-out prompts as token ids; a draft is better whose server counts 2 % more."""
    record(200)
    for name in ("old", "new"):
        Path(name).mkdir()
        Path(name, "config.json").write_text('{"block_size": 8}')
    bench.behaviours |= zip(("old", "new"), kinds, strict=True)
    arguments = ("recording", "--old", "old", "--new", "new", "--num-prompts", 8, *ONCE)
    status, out, err = bench("calibrate", "compare", "model", *arguments)
    assert status == 0
    assert "8 prompts, held out of training, of 400 recorded exchanges" in err
    # The newest of them, each once.
    newest = reversed(read_recording(Path("recording")).exchanges)
    held_out = dict.fromkeys(tuple(e.prompt_token_ids) for e in newest if e.is_held_out)
    asked = [tuple(each["prompt"]) for each in fake_server.asked("plain")]
    assert asked == [*held_out][:8] * 2
    old, new = ({"worse": 1.0, "drafts": 4.5}[kind] for kind in kinds)
    word = f"The new draft is {'better' if new > old else 'not better by 2 %'}"
    assert f"{word}: {new:.2f} tokens a verification, {old:.2f} of the old one." in out


def collected(url: str, *options: str, num_prompts: int) -> int:
    """Ask so many prompts; the exit status."""
    Path("data.jsonl").write_text('{"prompt": "a"}\n' * num_prompts)
    return status_of("calibrate", "collect", "--url", url, "--data", "data.jsonl", *options)


def test_collect(running: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt is asked once; what fails is reported, and a server that is gone ends it."""
    options = ("--concurrency", "3", "--max-tokens", "5")
    assert collected(running("plain"), *options, num_prompts=40) == 0
    assert capsys.readouterr().out.startswith("40 of 40 prompts answered, 400 tokens in ")
    asked = fake_server.asked("plain")
    assert len(asked) == 40
    assert {(each["model"], each["max_tokens"], each["key"]) for each in asked} == {
        ("served", 5, "Bearer secret")
    }
    assert all("temperature" not in each for each in asked)

    breaks = running("breaks")
    assert collected(breaks, "--concurrency", "1", num_prompts=8) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("3 of 8 prompts answered, 30 tokens in ")
    assert captured.err.count("too long") == 1
    assert collected(breaks, num_prompts=40) == 1
    assert "16 prompts in a row failed, the last so:" in capsys.readouterr().err
    assert collected("http://127.0.0.1:9", num_prompts=40) == 1
    assert capsys.readouterr().err == "The server cannot be reached at 127.0.0.1:9.\n"
