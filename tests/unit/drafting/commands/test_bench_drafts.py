"""``vllm-diffusion bench-drafts``, with a few lines of HTTP server where vLLM would be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import refusal_of, status_of
from vllm_diffusion.cli import server, shipped_server, values
from vllm_diffusion.cli.main import main
from vllm_diffusion.drafting.commands import (
    bench_drafts,
    collect,
    contenders,
    draft_runs,
    draft_table,
    processes,
)
from vllm_diffusion.drafting.commands.draft_runs import Contender, Growth, Result, Round, refusal
from vllm_diffusion.drafting.commands.draft_table import as_json, tables
from vllm_diffusion.drafting.commands.prompt_sets import Prompt
from vllm_diffusion.drafting.recording import Exchange

# What it does is its first argument; answers are ten tokens, seven of eight drafted ones kept.
FAKE_SERVER = """
import http.server, json, os, sys, threading, time
behaviour, port = sys.argv[1], int(sys.argv[2])
if behaviour == "dies":
    print("(EngineCore pid=7) RuntimeError: first", flush=True)
    print("ValueError: behind it", flush=True)
    sys.exit(3)
if behaviour == "never-ready":
    time.sleep(600)
lock, counts = threading.Lock(), dict(requests=0, asked=[])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(200, json.dumps({"object": "list", "data": [{"id": "served"}]}))
        n = counts["requests"]
        lines = [
            'vllm:request_success_total{finished_reason="stop"} %d' % n,
            'vllm:request_success_total{finished_reason="length"} 0',
            "vllm:generation_tokens_total %d" % (10 * n),
            "vllm:time_to_first_token_seconds_sum %f" % (0.25 * n),
        ]
        if behaviour in ("drafts", "worse"):
            lines += ["vllm:spec_decode_num_drafts_total %d" % (2 * n)]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += ['%s{position="%d"} %d' % (name, at, n * (behaviour == "drafts") * (2 if at < 3 else 1)) for at in range(4)]
        self.reply(200, "\\n".join(lines if self.path == "/metrics" else []) + "\\n")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            counts["asked"].append(asked | {"key": self.headers["authorization"]})
            open("asked-" + behaviour, "w").write(json.dumps(counts["asked"]))
            if behaviour == "breaks" and len(counts["asked"]) > 3:
                return self.reply(400, json.dumps({"error": {"message": "too long"}}))
            counts["requests"] += 1
        tokens = [1] * 9 + [3 if behaviour == "drafts-otherwise" else 2]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens}
        choice |= {"text": "x", "message": {"role": "assistant", "content": "said"}}
        self.reply(200, json.dumps({"id": "a", "created": 0, "model": "m", "choices": [choice]}))

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_server.py"
    path.write_text(FAKE_SERVER, encoding="utf-8")
    return path


@pytest.fixture
def bench(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Runs the command with fake servers; each does what its method is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shipped_server, "ENDING_SIGNALS", ())
    fakes = ("drafts", "dies", "breaks", "drafts-otherwise")
    monkeypatch.setattr(contenders, "METHODS", fakes)
    monkeypatch.setattr(contenders, "_WITHOUT_A_DRAFT", fakes)

    def serve(model: str, *options: str) -> list[str]:
        behaviour = "plain"
        if "--speculative-config" in options:
            spec = json.loads(options[options.index("--speculative-config") + 1])
            behaviour = spec["method"]
        return [sys.executable, str(script), behaviour, "{port}"]

    monkeypatch.setattr(draft_runs, "vllm_serve", serve)
    data = tmp_path / "data.jsonl"
    lines = [
        {"task": "talk", "turns": ["One?", "Two?"]},
        {"task": "talk", "messages": [{"role": "user", "content": "Hello"}]},
        {"task": "text", "prompt": [5, 6]},
    ]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["bench-drafts", "model", "--data", str(data), *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    run.read = lambda: capsys.readouterr().out
    return run


@pytest.mark.parametrize("order", ["--one-at-a-time", "--no-one-at-a-time"])
def test_bench(order: str, bench, tmp_path: Path) -> None:
    """Figures of the servers' counters, and reasons where there are none; nobody else is harmed."""
    methods = ("drafts", "dies", "breaks", "drafts-otherwise")
    status, out, err = bench(
        *("--method", *methods, "--rounds", "2", "--concurrency", "1", "3"),
        *(order, "--json", str(tmp_path / "out.json")),
    )
    assert status == 1
    assert "Traceback" not in err
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["prompts"] == {"talk": 2, "text": 1}
    by_name = {each["name"]: each for each in written["contenders"]}
    assert list(by_name) == ["no draft", *methods]
    for name, each in by_name.items():
        if name in ("dies", "breaks"):
            assert each["failure"]
            continue
        assert each["failure"] is None
        assert [load["concurrency"] for load in each["loads"]] == [1, 3]
        for load in each["loads"]:
            # Four answers of ten tokens, in each of two rounds.
            assert load["tokens"] == 80
            assert len(load["tokens_per_second"]) == 2
            assert load["first_token_seconds"] == pytest.approx(0.25)
            assert load["same_tokens"] is (name != "drafts-otherwise")
            assert load["tasks"]["text"]["tokens"] == 20
            assert load["tasks"]["text"]["ratio"] > 0
    drafted = by_name["drafts"]["loads"][0]
    # Each answer has one verification that kept three, and one that kept all four.
    assert drafted["accepted_lengths"] == [0, 0, 0, 8, 8]
    assert drafted["acceptance_by_position"] == [1, 1, 1, 0.5]
    assert drafted["tokens_per_verification"] == 4.5
    assert by_name["no draft"]["loads"][0]["verifications"] == 0
    assert by_name["no draft"]["resident_bytes"] > 2**20
    assert by_name["no draft"]["loads"][1]["ratios"] == [1.0, 1.0]

    assert re.search(
        r"^  task +talk +text\n  drafts +[\d.]+ +[\d.]+\n  drafts-otherwise ", out, re.M
    )
    # The first error of a log is the reason, without who said it.
    assert re.search(r"^dies: no figures\. RuntimeError: first \(log: \S+\.log\)$", out, re.M)
    assert re.search(
        r"^breaks: no figures\. \w+: The server refused the request: too long", out, re.M
    )
    assert len(re.findall(r"^  drafts +[\d.]+ .* no GPU +4\.50 +yes$", out, re.M)) == 2
    assert len(re.findall(r"^  drafts-otherwise .* NO$", out, re.M)) == 2
    assert re.search(r"^  position +1 +2 +3 +4\n  drafts +100 +100 +100 +50$", out, re.M)
    assert re.search(r"^  tokens kept +0 +1 +2 +3 +4\n  drafts +0 +0 +0 +50 +50$", out, re.M)
    # The server of each that was started is gone, and has left no log but of what failed.
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_what_is_asked(bench, tmp_path: Path) -> None:
    """Token ids as they are, a conversation as one, and a second turn behind the first's answer."""
    status, *_ = bench("--method", "drafts", "--rounds", "1", "--concurrency", "1")
    assert status == 0
    asked = json.loads((tmp_path / "asked-plain").read_text())
    others = json.loads((tmp_path / "asked-drafts").read_text())
    # Each server has a key of its own.
    assert [each | {"key": ""} for each in asked] == [each | {"key": ""} for each in others]
    # A round that is not counted, and one that is.
    assert len(asked) == 8
    assert asked[:4] == asked[4:]
    assert {each["temperature"] for each in asked} == {0}
    texts = [[m["content"] for m in each["messages"]] for each in asked[:4] if "messages" in each]
    assert sorted(texts) == [["Hello"], ["One?"], ["One?", "said", "Two?"]]
    assert [each["prompt"] for each in asked[:4] if "prompt" in each] == [[5, 6]]


@pytest.fixture
def running(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts servers that no command starts or stops; returns the address of each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with ExitStack() as stack:

        def start(behaviour: str) -> str:
            command = [sys.executable, str(script), behaviour, "{port}"]
            return stack.enter_context(server.Server(command, report=lambda _: None)).url

        yield start


def test_running_servers(running, bench, tmp_path: Path) -> None:
    """One a side, asked with thinking and without, by their own model's name and the key of the environment."""
    urls = [f"none={running('plain')}", f"mine={running('drafts')}/v1", "http://127.0.0.1:9"]
    arguments = ["--rounds", "1", "--concurrency", "2", "--thinking", "on", "off"]
    data = ("--data", str(tmp_path / "data.jsonl"))
    assert status_of("bench-drafts", "--base-url", *urls, *data, *arguments) == 1
    out = bench.read()
    assert re.search(r"^  mine +[\d.]+ +[\d.]+ .* 4\.50 +yes$", out, re.M)
    assert "mine, with" in out
    assert "times the tokens a second of none." in out
    assert re.search(
        r"^http://127.0.0.1:9: no figures.* cannot be reached at 127.0.0.1:9", out, re.M
    )
    assert "task  text  talk (thinking on)  talk (thinking off)" in re.sub("  +", "  ", out)
    asked = json.loads((tmp_path / "asked-drafts").read_text())
    assert {(each["model"], each["key"]) for each in asked} == {("served", "Bearer secret")}
    thinking = [each.get("chat_template_kwargs") for each in asked]
    # In each of two rounds: a text, and three answers of two conversations either way.
    assert thinking.count(None) == 2
    for word in (True, False):
        assert thinking.count({"enable_thinking": word}) == 6


def test_collect(running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt is asked once; what fails is told, and a server that is gone ends it."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 40)
    arguments = ("--data", "data.jsonl", "--concurrency", "3", "--max-tokens", "5")
    assert status_of("calibrate", "collect", "--url", running("plain"), *arguments) == 0
    assert capsys.readouterr().out.startswith("40 of 40 prompts answered, 400 tokens in ")
    asked = json.loads((tmp_path / "asked-plain").read_text())
    assert len(asked) == 40
    assert {(each["model"], each["max_tokens"], each["key"]) for each in asked} == {
        ("served", 5, "Bearer secret")
    }
    assert all("temperature" not in each for each in asked)
    (tmp_path / "few.jsonl").write_text('{"prompt": "a"}\n' * 8)
    arguments = ("--url", running("breaks"), "--data", "few.jsonl", "--concurrency", "1")
    assert status_of("calibrate", "collect", *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("3 of 8 prompts answered, 30 tokens in ")
    assert captured.err.count("too long") == 1
    assert status_of("calibrate", "collect", *arguments[:2], "--data", "data.jsonl") == 1
    assert "16 prompts in a row failed, the last so:" in capsys.readouterr().err
    assert status_of("calibrate", "collect", "--url", "http://127.0.0.1:9", *arguments[2:]) == 1
    assert capsys.readouterr().err == "The server cannot be reached at 127.0.0.1:9.\n"


def test_collect_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No more requests at a time than are allowed, and a line of progress now and then."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 30)
    lock, at_once, most = threading.Lock(), 0, 0

    def answers(*_: object) -> list[tuple[int, ...]]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        return [(1, 2)]

    monkeypatch.setattr(collect, "answers", answers)
    monkeypatch.setattr(collect, "first_model", lambda client: "m")
    monkeypatch.setattr(collect, "_REPORT_SECONDS", 0.02)
    arguments = ("--url", "http://a", "--data", str(tmp_path / "data.jsonl"), "--concurrency", "4")
    assert status_of("calibrate", "collect", *arguments) == 0
    assert most == 4
    assert re.search(r"^ +0 s  \d+ of 30 prompts, \d+ tokens$", capsys.readouterr().err, re.M)


def test_options_of_vllm(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known here goes to every server."""
    served = []
    serve = draft_runs.vllm_serve

    def noting(model: str, *options: str) -> list[str]:
        served.append((model, options))
        return serve(model, *options)

    monkeypatch.setattr(draft_runs, "vllm_serve", noting)
    arguments = ("--method", "drafts", "--rounds", "1", "--concurrency", "1")
    assert bench(*arguments, "--max-model-len", "99")[0] == 0
    assert [model for model, _ in served] == ["model", "model"]
    assert all(" --max-model-len 99" in " ".join(options) for _, options in served)


def test_no_baseline(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures of no draft the others have theirs, but no ratio."""
    serve = draft_runs.vllm_serve
    monkeypatch.setattr(
        draft_runs,
        "vllm_serve",
        lambda model, *options: [
            "dies" if part == "plain" else part for part in serve(model, *options)
        ],
    )
    status, out, _ = bench("--method", "drafts", "--rounds", "1", "--concurrency", "1")
    assert status == 1
    assert re.search(r"^  drafts +[\d.]+ +- +- ", out, re.M)


def test_memory(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server for which there is no room is not started, and the remedy is said."""
    monkeypatch.setattr(
        draft_runs.psutil, "virtual_memory", lambda: type("M", (), {"available": 1})
    )
    arguments = ("--method", "drafts", "--rounds", "1", "--concurrency", "1")
    status, out, _ = bench(*arguments, "--no-one-at-a-time")
    assert status == 1
    assert "drafts: no figures." in out
    assert "set --one-at-a-time" in out
    assert bench(*arguments, "--one-at-a-time")[0] == 0


def test_draft_without_a_block(tmp_path: Path, monkeypatch, capsys) -> None:
    """Refused before anything is started; a block among the fields of DFlash is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    said = refusal_of(capsys, "bench-drafts", "a/model", "--data", "tiny-tasks", "--draft", ".")
    assert "block_size=None in its config.json" in said
    (tmp_path / "config.json").write_text('{"dflash_config": {"block_size": 6}}')
    assert contenders.block_size_of(".") == 6


def recording(folder: Path, num_exchanges: int) -> list[list[int]]:
    """Writes a recording whose every prompt came twice; the prompts that are held out, newest first."""
    folder.mkdir()
    exchanges = [
        Exchange(array("i", [n, n + 1]), array("i", [3]), n) for n in range(1, 1 + num_exchanges)
    ]
    lines = [
        json.dumps({"prompt_token_ids": [*e.prompt_token_ids], "output_token_ids": [3], "time": t})
        for t, e in enumerate([*exchanges, *exchanges])
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return [[*e.prompt_token_ids] for e in reversed(exchanges) if e.is_held_out]


@pytest.mark.parametrize("kinds", [("worse", "drafts"), ("drafts", "worse"), ("drafts", "drafts")])
def test_compare(
    kinds: tuple[str, str], bench, script: Path, tmp_path, monkeypatch, capsys
) -> None:
    """Held-out prompts as token ids; the draft whose server counts more is better, beyond chance."""
    held_out = recording(tmp_path / "recording", 200)
    assert len(held_out) > 8
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"block_size": 8}')

    def serve(model: str, *options: str) -> list[str]:
        text = " ".join(options)
        behaviour = kinds["/new" in text] if "--speculative-config" in options else "plain"
        return [sys.executable, str(script), behaviour, "{port}"]

    monkeypatch.setattr(draft_runs, "vllm_serve", serve)
    drafts = ("--old", str(tmp_path / "old"), "--new", str(tmp_path / "new"))
    options = ("--num-prompts", "8", "--rounds", "1", "--concurrency", "1")
    assert (
        main(["calibrate", "compare", "model", str(tmp_path / "recording"), *drafts, *options]) == 0
    )
    captured = capsys.readouterr()
    assert "8 prompts, held out of training, of 400 recorded exchanges" in captured.err
    asked = json.loads((tmp_path / "asked-plain").read_text())
    assert [each["prompt"] for each in asked] == held_out[:8] * 2
    better = {"worse": 1.0, "drafts": 4.5}
    old, new = (better[kind] for kind in kinds)
    word = "The new draft is better" if new > old else "The new draft is worse"
    if new == old:
        word = "Neither draft is better beyond chance and 2 %"
    assert f"{word}: {new:.2f} tokens a verification, {old:.2f} of the old one." in captured.out


@pytest.mark.parametrize(
    ("num_exchanges", "options", "said"),
    [
        (0, (), "holds no exchange"),
        (1, (), "none of the 2 recorded exchanges is a prompt that is held out"),
        (200, ("--num-prompts", "0"), "--num-prompts: 0 must be an integer of at least 1"),
        (200, (), "--draft old: its config.json cannot be read"),
    ],
)
def test_compare_mistakes(
    num_exchanges: int, options, said: str, tmp_path, monkeypatch, capsys
) -> None:
    """One sentence, before anything is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recording(tmp_path / "recording", num_exchanges)
    arguments = ["compare", "model", "recording", "--old", "old", "--new", "new", *options]
    assert said in refusal_of(capsys, "calibrate", *arguments)


def options_of(entrants: list[Contender]) -> dict[str, tuple[Any, Any]]:
    """Of each its speculative and its additional configuration."""
    found = {}
    for each in entrants:
        named = dict(zip(each.options[::2], map(json.loads, each.options[1::2]), strict=True))
        found[each.name] = named.get("--speculative-config"), named.get("--additional-config")
    return found


def test_contenders(tmp_path: Path) -> None:
    """The tiny pair: every method, DFlash with its block, EAGLE-3 with a draft that is made."""
    target, draft = bench_drafts.shipped_checkpoint("qwen3"), bench_drafts.shipped_draft("qwen3")
    entrants = contenders.contenders(
        target,
        {"dflash": (str(draft),)},
        methods=contenders.default_methods({"dflash": (str(draft),)}, adds_models=True),
        steps=[1, 2],
        num_drafts=3,
        scratch=tmp_path,
    )
    found = options_of(entrants)
    dflash = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 7}
    three = {"num_speculative_tokens": 3}
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    head = {"model": str(tmp_path / "eagle3"), "draft_load_config": {"load_format": "dummy"}}
    assert found == {
        "no draft": (None, None),
        "dflash, 1 pass": (dflash, None),
        "dflash, 2 passes": (dflash, {"drafting": {"steps": 2}}),
        "adaptive": (dflash, {"drafting": {"adaptive": True}}),
        "ngram": ({"method": "ngram", **three, **lookup}, None),
        "draft_model": ({"method": "draft_model", "model": str(target), **three}, None),
        "eagle3": ({"method": "eagle3", **head, **three}, None),
    }
    notes = {each.name: each.note for each in entrants if each.note}
    assert notes.keys() == {"draft_model", "eagle3"}
    assert notes["eagle3"].startswith("untrained")


def test_given_drafts(tmp_path: Path) -> None:
    """Two DFlash drafts are told apart by their folders; others by their method, which is passed on."""
    for name, block in (("old", 8), ("new", 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"block_size": block}))
    read = values.named_model(contenders.draft_method)
    given = [str(tmp_path / "old"), str(tmp_path / "new"), "eagle3=a/b", "mtp=d"]
    drafts = contenders.drafts_by_method([read(each) for each in given])
    assert drafts["eagle3"] == ("a/b",)
    (tmp_path / "old").rename(tmp_path / "a=c")
    assert read(str(tmp_path / "a=c")) == ("", str(tmp_path / "a=c"))
    (tmp_path / "a=c").rename(tmp_path / "old")
    found = options_of(
        contenders.contenders(
            Path("a/target"),
            drafts,
            methods=contenders.default_methods(drafts, adds_models=False),
            steps=[1],
            num_drafts=4,
            scratch=tmp_path,
        )
    )
    numbers = {name: spec["num_speculative_tokens"] for name, (spec, _) in found.items() if spec}
    assert numbers == {
        "dflash old": 7,
        "dflash new": 15,
        "adaptive old": 7,
        "adaptive new": 15,
        "ngram": 4,
        "eagle3": 4,
        "mtp": 4,
    }


def test_refusal() -> None:
    """Ours over others', the first of those; nothing of a log without one."""
    log = "INFO x\n(A pid=1) pkg.mod.SomeError: one\nValueError: two\n"
    assert refusal(log) == "pkg.mod.SomeError: one"
    assert refusal(log + "vllm-diffusion: not that.\n") == "vllm-diffusion: not that."
    assert refusal("INFO ValueError: quoted\n") == ""
    said = "vllm_command.py serve: error: unrecognized arguments: --nonsense"
    assert refusal(f"usage: vllm serve\n{said}\n") == said
    log = "(A pid=1) a.ValidationError: 1 validation error for Config\n(A pid=1) method\n  No such one\nat x\n"
    assert refusal(log) == "a.ValidationError: 1 validation error for Config method No such one"


def test_processor_seconds() -> None:
    """They grow with work, and who has ended has none."""
    before = processes.processor_seconds([os.getpid()])
    while processes.processor_seconds([os.getpid(), 2**22 + 1]) < before + 0.05:
        sum(range(10_000))
    assert processes.processor_seconds([2**22 + 1]) == 0


def test_memory_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the most that a process had; on GPUs what the server's own have, where that is told."""
    block = bytearray(64 * 2**20)
    assert processes.peak_resident_bytes(os.getpid()) > len(block)
    assert processes.peak_resident_bytes(2**22 + 1) == 0

    used = {0: [(11, 5), (99, 70)], 1: [(12, 6)]}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            SimpleNamespace(pid=pid, usedGpuMemory=count) for pid, count in used[device]
        ],
    )
    utils = SimpleNamespace(import_pynvml=lambda: nvml)
    monkeypatch.setitem(sys.modules, "vllm.utils.import_utils", utils)
    monkeypatch.setattr(processes, "working_accelerator", lambda: "cuda")
    assert processes.device_bytes([10, 11, 12]) == 11
    assert processes.device_bytes([10]) is None
    used[1] = [(12, None)]
    assert processes.device_bytes([11, 12]) is None
    del nvml.nvmlInit
    assert processes.device_bytes([11]) is None
    monkeypatch.setattr(processes, "working_accelerator", lambda: None)
    assert processes.device_bytes([11]) == 0


def rounds_of(speeds: list[float], task: str = "a") -> list[Round]:
    said = ((1, 2),)
    return [
        Round(task, 1, index, 1 / speed, 2 / speed, Growth(1, 1, 0.1), said)
        for index, speed in enumerate(speeds, start=1)
    ]


@given(st.lists(st.floats(0.5, 500), min_size=1, max_size=5), st.floats(0.1, 10))
def test_ratio(speeds: list[float], times: float) -> None:
    """Whatever a machine does from round to round, as long as it does it to all."""
    slow, fast = rounds_of(speeds), rounds_of([speed * times for speed in speeds])
    assert draft_table.tokens_per_second(slow) == pytest.approx(speeds)
    assert draft_table.ratios(fast, slow) == pytest.approx([times] * len(speeds))
    assert draft_table.processor_ratios(fast, slow) == pytest.approx([times] * len(speeds))
    idle = [replace(each, processor_seconds=0.0) for each in slow]
    assert draft_table.processor_ratios(fast, idle) == []


@pytest.mark.parametrize(("one", "several"), [(2.0, 1.5), (2.0, 3.0), (0.5, 0.4)])
def test_verdict(one: float, several: float) -> None:
    """The fastest, whether any pays, and whether passes do."""
    results = [
        Result(Contender("no draft"), rounds_of([10, 10])),
        Result(Contender("dflash, 1 pass", passes=1), rounds_of([10 * one, 10 * one])),
        Result(Contender("dflash, 2 passes", passes=2), rounds_of([10 * several, 10 * several])),
    ]
    plan = draft_runs.Plan((Prompt("a", text="x"),), (1,), 2, 8, 0.0)
    said = tables(as_json(results, plan))
    best = "dflash, 1 pass" if one > several else "dflash, 2 passes"
    pays = "the fastest is" if max(one, several) > 1 else "no draft pays; the fastest is"
    assert f"1 at a time: {pays} {best}, with {max(one, several):.2f} times" in said
    does = "pay" if several > one else "do not pay"
    assert f"1 at a time: 2 passes {does}: {several / one:.2f} times" in said


def test_interrupted(script: Path, tmp_path: Path) -> None:
    """Ctrl-C ends every server, without a stack trace."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}')
    code = (
        "import sys, tempfile; from vllm_diffusion.cli import main; "
        "from vllm_diffusion.drafting.commands import draft_runs; "
        f"tempfile.tempdir = {str(tmp_path)!r}; "
        "kinds = iter(['plain', 'never-ready']); "
        f"draft_runs.vllm_serve = lambda *_: {[sys.executable, str(script)]!r} + [next(kinds), '{{port}}']; "
        "sys.exit(main.main(['bench-drafts', 'm', '--data', 'data.jsonl', '--no-one-at-a-time']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    started = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(children := started.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 2
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.rstrip().endswith("Interrupted.")
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
