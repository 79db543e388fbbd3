"""Commands that measure servers or send them requests, with fake servers; tests with real ones are
in ``end_to_end``.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.doubles import fake_server
from tests.support.engines.commands import status_of
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli import checkpoint, server
from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.drafting.commands import contenders, draft_runs
from vllm_diffusion.drafting.presets import Preset
from vllm_diffusion.drafting.recording import read_recording

METHODS = ("drafts", "dies", "breaks", "drafts-otherwise")
ONCE = ("--rounds", "1")
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Bench:
    """Run a command; each fake server behaves as the name of its method, its way or its draft's
    folder implies.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint, "ENDING_SIGNALS", ())
    monkeypatch.setattr(contenders, "METHODS", (*METHODS, "dflash"))
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
    """The report has figures from the servers' counters, and reasons where a server failed; a
    failed server does not affect the others.
    """
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


def test_ways(bench: Bench) -> None:
    """Methods whose answers differ although they are promised to be the same are named in the last
    line, and the exit status is 1.
    """
    words = ("bench-drafts", "model", "--data", "data.jsonl", "--concurrency", "1", *ONCE)
    status, out, _ = bench(*words, "--method", "linear_spec,draft_length=8", "autoregressive")
    assert status == 1
    # What its server counts of the ten tokens of an answer.
    assert re.search(r"^  linear_spec\S+ .* 1\.50 +0\.50 +1\.60 +NO$", out, re.M), out
    assert out.endswith(
        "Answers DIFFER from those of autoregressive: linear_spec,draft_length=8.\n"
    )
    # Of one way alone nothing is promised.
    status, out, _ = bench(*words, "--method", "linear_spec")
    assert status == 0
    assert "No answers were compared" in out


def test_requests_of_a_mixture(bench: Bench) -> None:
    """Requests to a server of all ways choose each way in turn, and their answers are compared
    with nothing.
    """
    prompts = [f'{{"prompt": [{n}]}}\n' for n in range(4)]
    Path("four.jsonl").write_text("".join(prompts))
    words = ("bench-drafts", "model", "--data", "four.jsonl", "--concurrency", "1", *ONCE)
    status, out, _ = bench(*words, "--method", "mixed")
    assert status == 0
    assert re.search(r"^  mixed +[\d.]+ +1\.00 ", out, re.M), out
    chosen = [
        request.get("vllm_xargs", {}).get("diffusion_rule")
        for request in fake_server.asked("plain")
    ]
    assert chosen == [None, "autoregressive", "linear_spec", None] * 2


def test_two_drafts_on_a_recording(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts are distinguished by their folders, and each is sent the newest held-out prompts
    of a recording, each prompt once. One with a card has its tokens as a share of the card's.
    """
    known = {"drafts": Preset("target", "drafts", kept={"easy": 12.0, "hard": 9.0})}
    monkeypatch.setattr(contenders, "preset_of", known.get)
    # Every prompt came twice.
    lines = [
        json.dumps({"prompt_token_ids": [n, n + 1], "output_token_ids": [3], "time": time})
        for time, n in enumerate([*range(200)] * 2)
    ]
    Path("recording").mkdir()
    Path("recording/engine0-00000000.jsonl").write_text("\n".join(lines))
    for name in ("worse", "drafts"):
        Path(name).mkdir()
        Path(name, "config.json").write_text('{"block_size": 8}')
    words = ("--method", "dflash", "--draft", "worse", "drafts", "--concurrency", 1, *ONCE)
    words += ("--data", "recording", "--num-prompts", 8, "--json", "out.json")
    status, out, _ = bench("bench-drafts", "model", *words)
    assert status == 0
    newest = reversed(read_recording(Path("recording")).exchanges)
    held_out = dict.fromkeys(tuple(e.prompt_token_ids) for e in newest if e.is_held_out)
    asked = [tuple(request["prompt"]) for request in fake_server.asked("plain")]
    assert asked == [*held_out][:8] * 2
    assert re.search(r"tokens/verification +of the card's +same tokens$", out, re.M), out
    for name, tokens in (("worse", "1.00 +-"), ("drafts", "4.50 +0.50")):
        assert re.search(rf"^  dflash {name} .* {tokens} +\w+$", out, re.M), out
    results = json.loads(Path("out.json").read_text())["results"]
    assert [each["of_the_card"] for each in results] == [None, None, 0.5]


def test_collect(bench: Bench) -> None:
    """Every prompt is sent once, failed requests are reported, and the command ends when the server
    is gone.
    """
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
    """Two DFlash drafts are distinguished by their folders, and drafts of other methods by the
    method, which is passed on. Adaptive drafts are not held to the card of a published one.
    """
    new = "Muse-Glimmer-30B-DFlash2"
    for name, block in (("old", 8), (new, 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"block_size": block}))
    given = [str(tmp_path / "old"), str(tmp_path / new), "eagle3=a/b", "mtp=d"]
    drafts = [contenders.named_draft(each) for each in given]
    entrants = contenders.contenders([], drafts)
    assert {
        entrant.name: json.loads(entrant.options[1])["num_speculative_tokens"]
        for entrant in entrants[1:]
    } == {
        "dflash old": 7,
        f"dflash {new}": 15,
        "eagle3": 4,
        "mtp": 4,
        "adaptive old": 7,
        f"adaptive {new}": 15,
        "ngram": 4,
    }
    assert {each.name: each.card for each in entrants if each.card} == {f"dflash {new}": 4.42}


def test_settings_of_methods(tmp_path: Path) -> None:
    """A method's settings go where its server reads them: to ``drafting`` for DFlash, to
    ``diffusion`` for Uno, otherwise to the speculative configuration.
    """
    (tmp_path / "config.json").write_text('{"block_size": 8}')
    texts = (
        "dflash",
        "dflash,steps=2,order=position",
        "adaptive",
        "uno,draft_length=17",
        "ngram,num_speculative_tokens=8",
    )
    methods = [contenders.named_method(each) for each in texts]
    plain, passes, adaptive, uno, ngram = contenders.contenders(
        [*methods, methods[0]],
        [("dflash", str(tmp_path)), ("uno", "a/uno")],
        str(shipped_checkpoint("qwen3")),
    )[1:]
    assert plain.options == passes.options[:2]
    assert json.loads(passes.options[3]) == {"drafting": {"steps": 2, "order": "position"}}
    assert json.loads(adaptive.options[3]) == {"drafting": {"adaptive": True}}
    assert json.loads(uno.options[1]) == {"architectures": ["UnoQwen3ForCausalLM"]}
    section = {"draft_adapter": "a/uno", "draft_length": 17}
    assert json.loads(uno.options[3]) == {"diffusion": section}
    (tmp_path / "config.json").write_text("{")
    for option, draft in (("target", ("uno", "a/uno")), ("--draft", ("dflash", str(tmp_path)))):
        with pytest.raises(
            UsageError, match=f"^{option} {tmp_path}: its config.json cannot be read"
        ):
            contenders.contenders([], [draft], str(tmp_path))
    assert json.loads(ngram.options[1])["num_speculative_tokens"] == 8
