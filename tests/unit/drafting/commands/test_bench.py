"""Commands that measure or ask servers, with fake ones where vLLM's would be; real ones in ``end_to_end``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fake_server
from tests.support.commands import status_of
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.drafting.commands import contenders, draft_runs
from vllm_diffusion.drafting.recording import read_recording

METHODS = ("drafts", "dies", "breaks", "drafts-otherwise")
ONCE = ("--rounds", "1")
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Bench:
    """Runs a command; each server behaves as its method, its rule or the folder of its draft is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(contenders, "METHODS", METHODS)
    monkeypatch.setattr(contenders, "_WITHOUT_A_DRAFT", METHODS)
    Path("data.jsonl").write_text(
        '{"task": "talk", "messages": [{"role": "user", "content": "One?"}]}\n'
        '{"task": "text", "prompt": [5, 6]}\n'
    )

    def serve(_: str, *options: str) -> list[str]:
        behaviour = "plain"
        if "--speculative-config" in options:
            spec = json.loads(options[options.index("--speculative-config") + 1])
            behaviour = Path(spec.get("model", spec["method"])).name
        elif "--additional-config" in options:
            config = json.loads(options[options.index("--additional-config") + 1])
            if config["diffusion"].get("rule") == "linear_spec":
                behaviour = "verifies-otherwise"
        return fake_server.command(behaviour)

    monkeypatch.setattr(draft_runs, "vllm_serve", serve)

    def run(*arguments: object) -> tuple[int, str, str]:
        status = status_of(*arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return run


@pytest.mark.slow
def test_bench_drafts(bench: Bench, tmp_path: Path) -> None:
    """Figures of the servers' counters, and reasons where there are none; nobody else is harmed."""
    options = ("--data", "data.jsonl", "--rounds", "2", "--concurrency", "1", "3")
    options += ("--json", "out.json")
    status, out, _ = bench("bench-drafts", "model", "--method", *METHODS, *options)
    assert status == 1
    by_name = {
        result["contender"]["name"]: result
        for result in json.loads(Path("out.json").read_text())["results"]
    }
    assert list(by_name) == ["no draft", *METHODS]
    assert {name for name in by_name if by_name[name]["failure"]} == {"dies", "breaks"}
    # Two tasks, with two loads, in each of two rounds.
    assert len(by_name["drafts"]["rounds"]) == 8
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
    ):
        assert len(re.findall(pattern, out, re.M)) == times, (pattern, out)
    # The server of each that was started is gone, and has left no log but of what failed.
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_bench_ways(bench: Bench) -> None:
    """Answers that differ where they may not end the command with status 1, and are said in one line."""
    words = ("bench-ways", "model", "--data", "data.jsonl", "--requests", "1", *ONCE)
    status, out, _ = bench(*words, "--ways", "linear_spec,draft_length=8", "autoregressive")
    assert status == 1
    # What its server counts of the ten tokens of an answer.
    assert re.search(r"^  linear_spec\S+ .* 1\.50 +0\.50 +1\.60 +NO$", out, re.M), out
    assert out.endswith(
        "Answers DIFFER from those of autoregressive: linear_spec,draft_length=8.\n"
    )
    # Of one way alone nothing is promised.
    status, out, _ = bench(*words, "--ways", "linear_spec")
    assert status == 0
    assert "No answers were compared" in out


def test_requests_of_a_mixture(bench: Bench) -> None:
    """The requests of a server of all ways choose each by turns, and what they answer is compared with nothing."""
    prompts = [f'{{"prompt": [{n}]}}\n' for n in range(4)]
    Path("four.jsonl").write_text("".join(prompts))
    words = ("bench-ways", "model", "--data", "four.jsonl", "--requests", "1", *ONCE)
    status, out, _ = bench(*words, "--ways", "mixed")
    assert status == 0
    assert re.search(r"^  mixed +[\d.]+ +1\.00 ", out, re.M), out
    chosen = [
        request.get("vllm_xargs", {}).get("diffusion_rule")
        for request in fake_server.asked("plain")
    ]
    assert chosen == [None, "autoregressive", "linear_spec", None] * 2


@pytest.mark.parametrize(("old", "new"), [("worse", "drafts"), ("drafts", "worse")])
def test_compare(old: str, new: str, bench: Bench) -> None:
    """Held-out prompts as token ids; a draft is better whose server counts 2 % more."""
    # Every prompt came twice.
    lines = [
        json.dumps({"prompt_token_ids": [n, n + 1], "output_token_ids": [3], "time": time})
        for time, n in enumerate([*range(200)] * 2)
    ]
    Path("recording.jsonl").write_text("\n".join(lines))
    for name in (old, new):
        Path(name).mkdir()
        Path(name, "config.json").write_text('{"block_size": 8}')
    words = ("recording.jsonl", "--old", old, "--new", new, "--num-prompts", 8, "--concurrency", 1)
    status, out, err = bench("calibrate", "compare", "model", *words, *ONCE)
    assert status == 0
    assert "8 prompts, held out of training, of 400 recorded exchanges" in err
    # The newest of them, each once.
    newest = reversed(read_recording(Path("recording.jsonl")).exchanges)
    held_out = dict.fromkeys(tuple(e.prompt_token_ids) for e in newest if e.is_held_out)
    asked = [tuple(request["prompt"]) for request in fake_server.asked("plain")]
    assert asked == [*held_out][:8] * 2
    decision = {"drafts": "better: 4.50", "worse": "not better by 2 %: 1.00"}[new]
    assert f"The new draft is {decision} tokens a verification, " in out


def test_collect(bench: Bench) -> None:
    """Every prompt is asked once; what fails is reported, and a server that is gone ends it."""
    words = ("calibrate", "collect", "--data", "data.jsonl", "--num-prompts", 40)
    Path("data.jsonl").write_text('{"prompt": "a"}\n' * 40)
    with server.Server(fake_server.command("plain"), report=lambda _: None) as running:
        key = ("--url", running.url, "--api-key", running.api_key)
        status, out, _ = bench(*words, *key, "--max-tokens", 5)
    assert status == 0
    assert out.startswith("40 of 40 prompts answered, 400 tokens in ")
    asked = fake_server.asked("plain")
    assert len(asked) == 40
    assert {each["max_tokens"] for each in asked} == {5}
    assert all("temperature" not in each for each in asked)
    with server.Server(fake_server.command("breaks"), report=lambda _: None) as running:
        key = ("--url", running.url, "--api-key", running.api_key)
        status, _, err = bench(*words, *key)
    assert status == 1
    assert err.count("too long") == 2
    assert "16 prompts in a row failed, the last so:" in err
    gone = bench(*words, "--url", running.url)
    assert gone == (1, "", f"The server cannot be reached at {running.url.partition('//')[2]}.\n")


def test_given_drafts(tmp_path: Path) -> None:
    """Two DFlash drafts are told apart by their folders; others by their method, which is passed on."""
    for name, block in (("old", 8), ("new", 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"block_size": block}))
    given = [str(tmp_path / "old"), str(tmp_path / "new"), "eagle3=a/b", "mtp=d"]
    drafts = [contenders.named_draft(each) for each in given]
    entrants = contenders.contenders(drafts, methods=[], steps=[1], num_drafts=3)
    assert {
        entrant.name: json.loads(entrant.options[1])["num_speculative_tokens"]
        for entrant in entrants[1:]
    } == {
        "dflash old": 7,
        "dflash new": 15,
        "eagle3": 3,
        "mtp": 3,
        "adaptive old": 7,
        "adaptive new": 15,
        "ngram": 3,
    }
