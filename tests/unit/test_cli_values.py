"""Invalid values of commands are reported in one line before anything is imported or started."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.support.engines.commands import refusal_of
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.commands import contenders

TARGET, DRAFT = str(shipped_checkpoint("qwen3")), str(shipped_draft())
BENCH = ("bench-drafts", "a/model", "--data", "tiny-tasks")
TRAIN = ("calibrate", "train", TARGET, "recording", "--out", "new", "--from", DRAFT)
URL = ("--url", "http://127.0.0.1:9")
REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "--help` shows the usage"),
    (("nonsense",), "invalid choice: 'nonsense'"),
    (("demo", "a", "b"), "unrecognized arguments: b"),
    (("demo", "--max-tokens", "1024"), "--max-tokens: '1024' must be an integer from 1 to 1023"),
    (("demo", "--seed", "9" * 400), "--seed: '999"),
    (("demo", "--family", "sdar", "--draft"), "set --family to qwen3"),
    (("checkpoint", "--family", "nope"), "choose from"),
    (("chat", "--url", "nonsense"), "--url: 'nonsense' must be the address of a server"),
    (("chat", "--max-tokens", "0"), "'0' must be an integer of at least 1"),
    (("chat", "--model", "a"), "--model needs the server's --url"),
    (("chat", *URL, "--verbose"), "--verbose is of a server that chat starts"),
    (("serve-page", "/etc"), "MODEL: '/etc' must be a folder with config.json or params.json"),
    (("serve-page", "a/b/c"), "MODEL: 'a/b/c' must be a folder"),
    (("serve-page", "--port", "65536"), "--port: '65536' must be an integer from 1 to 65535"),
    (("serve-page", "--host", "no.such.host.invalid"), "--host no.such.host.invalid must be"),
    (("serve-page", "--ssl-certfile", "/no/file"), "ssl_certfile: '/no/file' must be a file"),
    (("serve-page", "--shutdown-timeout", "nan"), "shutdown_timeout: 'nan' must be a number"),
    (("serve-page", "--headless"), "--headless: a browser needs an HTTP port"),
    (("doctor", "--report", "x"), "--report needs --gpu"),
    (("doctor", "--gpu", "--report", "/no/folder/x"), "--report: '/no/folder/x' must be a file"),
    (("drafts", "nope"), "known targets"),
    (("bench-drafts", "a/model"), "--data is missing"),
    (("bench-drafts", "a/model", "--data", "/no/file"), "--data /no/file: No such file"),
    ((*BENCH, "--temperature=-1"), "--temperature: '-1' must be a number of at least 0"),
    ((*BENCH, "--draft", "eagle3=/no/folder"), "--draft: '/no/folder' must be a folder"),
    ((*BENCH, "--method", "nope"), "--method: 'nope' must be one of"),
    ((*BENCH, "--method", "dflash"), "give --draft MODEL"),
    ((*BENCH, "--method", "eagle"), "give --draft eagle=MODEL"),
    ((*BENCH, "--method", "diffusion,=3"), "'diffusion,=3' must be one of"),
    ((*BENCH, "--method", "dflash", "mixed"), "--method mixed is for diffusion models"),
    ((*BENCH, "--method", "mixed", "--draft", DRAFT), "--method mixed is for diffusion models"),
    (("calibrate", "collect", *URL), "--data is missing"),
    (TRAIN, "recording cannot be read"),
    ((*TRAIN, "--from", "/etc"), "--from: '/etc' must be a folder with config.json"),
    (("calibrate", "collect", *URL, "--thinking"), "unrecognized arguments: --thinking"),
    (("calibrate", "train", "/no/one", *TRAIN[3:]), "'/no/one' must be a folder with config.json"),
    ((*TRAIN, "--minutes", "0"), "--minutes=0.0 must be a number above 0"),
    ((*TRAIN, "--learning-rate", "nan"), "--learning-rate=nan must be a number above 0"),
    ((*TRAIN, "--out", "/dev/null/a"), "--out: '/dev/null/a' must be a folder that can be written"),
)


# Second lines of a file of prompts.
BAD_PROMPTS = (
    ("[1]", "must be an object with either prompt or messages"),
    ("{", "Expecting property name"),
    ('{"prompt": "a", "messages": []}', "either prompt or messages"),
    ('{"prompt": [1, true]}', "prompt must be a string or a list of token ids"),
    ('{"messages": []}', "messages must be a non-empty list"),
    ('{"messages": [{"content": "a"}]}', "messages must be objects with role and content"),
    ('{"prompt": "a", "task": 3}', "task=3 must be a name"),
)


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands in a folder of the test, and fail if one starts a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_refused(words: tuple[str, ...], said: str, nothing_starts, capsys) -> None:
    """An invalid value gives status 2 and one line that names it, and nothing is started."""
    assert said in refusal_of(capsys, *words)


@pytest.mark.parametrize(("line", "said"), BAD_PROMPTS)
def test_refused_prompts(line: str, said: str, nothing_starts, capsys) -> None:
    """An invalid prompt is reported with the number of its line and the reason."""
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n' + line)
    refusal = refusal_of(capsys, "bench-drafts", "a/model", "--data", "bad.jsonl")
    assert "line 2: " in refusal
    assert said in refusal


def test_nothing_heavy() -> None:
    """Commands that do not need the engine import neither it nor other heavy packages."""
    heavy = ("torch", "vllm", "openai", "transformers")
    for code in (
        "from vllm_diffusion.cli.main import main; main(['checkpoint'])",
        "import vllm_diffusion.live",
    ):
        code += f"; import sys; sys.exit(any(name in sys.modules for name in {heavy}))"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.engine
def test_methods_of_vllm() -> None:
    """Every drafting method of vLLM is accepted, except extraction and custom classes."""
    from vllm.config.speculative import SpeculativeMethod

    known = {*get_args(SpeculativeMethod)} - {"extract_hidden_states", "custom_class"}
    assert [contenders.named_method(method).name for method in known] == [*known]
    assert {*contenders.METHODS} - {contenders.ADAPTIVE, contenders.UNO} <= known
