"""Every value of every command is checked before anything is imported or started."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.commands import refusal_of
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.main import build_parser
from vllm_diffusion.drafting.commands import contenders
from vllm_diffusion.drafting.commands.gone_options import GoneOption

# What no reader of values takes; of each option, what its kind of value is not.
NUMBERS = ("-1.5", "nan", "abc", "", "9" * 400)
HOSTILE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("integer", "number", "temperature", "seed", "port"), NUMBERS),
    "text": ("", "  ", "\udcff"),
    "key": ("", " a", "a\nb", "schlüssel"),
    "url": ("nonsense", "ftp://a", "http://", "http://a:99999", "http://user:key@a", "http://a b", ""),
    "_server": ("nonsense", "a=ftp://a", "a=", ""),
    "model": ("/no/such/folder", "a/b/c", "a b", "", "\x1b[2J", "/etc", "/dev/null"),
    "named_model": ("nope=a/model", "eagle3=/no/such/folder", "eagle3=", ""),
    "draft_method": ("nope", ""),
    "source": ("/no/such/file", "/etc", "/dev/null", "gms8k", ""),
    "recording": ("/no/such/folder", "/dev/null", ""),
    "samples": ("/no/such/folder", "/etc", ""),
    "draft": ("/no/such/folder", "/etc", ""),
    "file": ("/no/such/file", "/etc", ""),
    "path_of": ("", "a\nb", "a" * 5000),
    "folder": ("/dev/null", "/dev/null/a", "", "\x1b[2J"),
    "new_folder": ("/etc", "/dev/null", "/dev/null/a", ""),
    "empty_folder": ("/etc", "/dev/null", ""),
    "new_file": ("/etc", "/no/such/folder/a", "/dev/null", ""),
    "layer_ids": ("a", "1,,2", "2,1", "-1", ""),
    "way": ("nope", "linear_spec,draft_length", "diffusion,=3", ""),
    "device": ("tpu", "cuda:x", "cuda", ""),
}  # fmt: skip
# Sent too, where the bound is another one: a number of tokens, steps, MiB, a share, a block.
ZERO = ("integer", "number")
TAKES_ZERO = ("--mask-token-id", "--revealed-share", "--idle-seconds")
# What is not an option of ours: those that no value follows, and the help.
WITHOUT_VALUES = (
    *(argparse._StoreTrueAction, argparse.BooleanOptionalAction, argparse._HelpAction),
    GoneOption,
)


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Every command that runs something, as its words and its parser."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield path, parser
    for action in nested:
        for name, below in action.choices.items():
            yield from commands(below, (*path, name))


def kind_of(action: argparse.Action) -> str:
    """The function of :mod:`values`, or of a command, that reads an option."""
    read = action.type
    assert callable(read), f"{action.dest} has a value that nothing checks"
    return read.__qualname__.partition(".")[0]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A value of each kind that is taken."""
    return good_values(tmp_path_factory.mktemp("good"))


def good_values(folder: Path) -> dict[str, str]:
    """A value of each kind that is taken.

    Args:
        folder: Where the files are made that some of them name.
    """
    for name in ("config.json", "extraction.json"):
        (folder / name).write_text(json.dumps({"block_size": 4}), encoding="utf-8")
    (folder / "a.jsonl").write_text('{"token_ids": [1, 2]}\n', encoding="utf-8")
    taken = dict.fromkeys(("model", "draft", "samples", "recording", "folder"), str(folder))
    return taken | {"url": "http://127.0.0.1:9", "new_folder": str(folder / "new")} | {
        "empty_folder": str(folder / "new"), "layer_ids": "1", "integer": "2", "text": "a",
        "new_file": str(folder / "new.json"), "way": "diffusion",
    }  # fmt: skip


def command_line(
    parser: argparse.ArgumentParser, tried: argparse.Action, given: list[str], good: dict[str, str]
) -> list[str]:
    """What a command must be given, with one of its options or positionals in its place."""
    groups = [group for group in parser._mutually_exclusive_groups if group.required]
    first = [group._group_actions[0] for group in groups if tried not in group._group_actions]
    words: list[str] = []
    for action in parser._actions:
        is_positional = not action.option_strings and action.nargs is None
        if action is tried:
            words += given
        elif action.required or is_positional or action in first:
            words += [*action.option_strings[:1], good[kind_of(action)]]
    return words


def cases() -> list[Any]:
    """Each command, option and hostile value."""
    found = []
    for path, parser in commands(build_parser()):
        for action in parser._actions:
            if isinstance(action, WITHOUT_VALUES) or action.dest == "arguments":
                continue
            if action.choices is not None:
                hostile: tuple[str, ...] = ("nope", "")
            else:
                kind = kind_of(action)
                hostile = HOSTILE[kind]
                if kind in ZERO and not set(TAKES_ZERO) & set(action.option_strings):
                    hostile += ("0",)
            name = (action.option_strings or [action.dest])[0]
            found.append(pytest.param(path, name, hostile, id=" ".join((*path, name))))
    # Read by a parser of their own: the options of `vllm serve` on which the page depends.
    found += [
        pytest.param(("serve-page",), name, hostile, id=f"serve-page {name}")
        for name, hostile in (
            ("--port", (*NUMBERS, "0", "65536")),
            ("--host", ("", "no.such.host.invalid", "999.1.1.1")),
            ("--root-path", ("", "\udcff")),
            ("--ssl-certfile", HOSTILE["file"]),
            ("--shutdown-timeout", NUMBERS),
            ("MODEL", HOSTILE["model"][:-4]),
        )
    ]
    return found


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was imported or started, of that which takes seconds."""
    heavy = ("torch", "vllm", "transformers", "datasets")
    noted: list[str] = []

    class Importing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] in heavy:
                noted.append(name)

    for name in list(sys.modules):
        if name.partition(".")[0] in heavy:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Importing(), *sys.meta_path])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: noted.append("a process"))
    return noted


def hostile_lines(
    path: tuple[str, ...], name: str, hostile: tuple[str, ...], good: dict[str, str]
) -> list[list[str]]:
    """A command line for each hostile value of one option."""
    parser = dict(commands(build_parser()))[path]
    tried = [each for each in parser._actions if name in (*each.option_strings, each.dest)]
    lines = []
    for value in hostile:
        # Behind a sign, since a value that begins with a hyphen is an option otherwise.
        words = [f"{name}={value}"] if name.startswith("-") else [value]
        lines.append(command_line(parser, tried[0], words, good) if tried else words)
    return lines


@pytest.mark.parametrize(("path", "name", "hostile"), cases())
def test_hostile_values(
    path: tuple[str, ...],
    name: str,
    hostile: tuple[str, ...],
    good: dict[str, str],
    nothing_starts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2 and one line that names the option; nothing is imported, nothing is started."""
    for words in hostile_lines(path, name, hostile, good):
        said = refusal_of(capsys, *path, *words)
        assert said.startswith(f"vllm-diffusion {' '.join(path)}: ")
        assert name in said
        allowed = ("must be", "cannot be", "choose from", "give", "name a", "known targets")
        assert any(word in said for word in allowed), said
        assert "\x1b" not in said
    assert nothing_starts == []


def test_every_command_is_tried() -> None:
    """None is left out by its kind."""
    tried = {case.values[0] for case in cases()}
    assert {path for path, _ in commands(build_parser())} == tried
    assert len(cases()) > 60


COMBINATIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    *(
        ((command, "--family", "sdar", "--draft"), "set --family to qwen3")
        for command in ("demo", "checkpoint")
    ),
    (("chat", "--model", "a"), "--model needs the server's --url"),
    (("chat", "--api-key", "a"), "--api-key needs the server's --url"),
    (("chat", "--url", "http://127.0.0.1:9", "--family", "sdar"), "--family"),
    (("chat", "--url", "http://127.0.0.1:9", "--verbose"), "--verbose"),
    (("serve-page", "--headless"), "--headless"),
    (("bench-drafts", "a/model"), "--data is missing"),
    (("bench-drafts", "a/model", "another"), "unrecognized arguments: another"),
    (("bench-drafts", "a/model", "--data", "tiny-tasks", "--method", "dflash"), "--draft MODEL"),
    (("bench-drafts", "a/model", "--data", "tiny-tasks", "--method", "eagle"), "eagle=MODEL"),
    (("bench-drafts", "a/model", "--base-url", "http://a"), "--base-url is gone"),
    (("bench-ways", "a/model"), "--data is missing"),
    (("calibrate", "collect", "--url", "http://a"), "--data is missing"),
    (("swap-draft", "a", "--roll-back", "--url", "http://127.0.0.1:9"), "--roll-back"),
    (("drafts", "nope"), "known targets"),
)


@pytest.mark.parametrize(("words", "said"), COMBINATIONS, ids=lambda value: " ".join(value))
def test_combinations(
    words: tuple[str, ...],
    said: str,
    nothing_starts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Values that cannot be meant together are refused alike."""
    assert said in refusal_of(capsys, *words)
    assert nothing_starts == []


def test_fresh_process() -> None:
    """In a process of its own a refusal imports neither vLLM nor torch, nor the client of the API."""
    code = (
        "import sys; from vllm_diffusion.cli.main import main\n"
        "try: main(['bench-drafts', '--temperature', '-1'])\n"
        "except SystemExit as end: print(end.code)\n"
        "print([name for name in ('torch', 'vllm', 'openai', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ended.stdout == "2\n[]\n"


@pytest.mark.parametrize(
    ("read", "taken"),
    [
        (values.url, {"http://a:1/v1/": "http://a:1", "https://[::1]:8/x": "https://[::1]:8/x"}),
        (values.integer(1, 3), {"1": 1, "3": 3}),
        (values.number(above=0, most=1), {"1e-9": 1e-9, "1": 1.0}),
        (values.temperature, {"0": 0.0, "2": 2.0}),
        (values.seed, {str(-(2**63)): -(2**63)}),
        (values.layer_ids, {"0,4,9": [0, 4, 9]}),
        (values.device, {"cpu": "cpu"}),
        (values.model, {"gpt2": "gpt2", "a/b-c.d": "a/b-c.d", "s3://bucket/a": "s3://bucket/a"}),
        (values.schema, {'{"type": "object"}': {"type": "object"}}),
    ],
)
def test_taken(read: Callable[[str], Any], taken: dict[str, Any]) -> None:
    """What is meant is read."""
    assert {value: read(value) for value in taken} == taken


def test_paths(tmp_path: Path) -> None:
    """Folders and files that a command reads, makes or writes; a pipe is none."""
    assert values.model(str(shipped_checkpoint())) == str(shipped_checkpoint())
    assert values.new_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert values.empty_folder(str(tmp_path)) == tmp_path
    assert values.new_file(str(tmp_path / "a.json")) == tmp_path / "a.json"
    os.mkfifo(tmp_path / "config.json")
    for read in (values.draft, values.model):
        with pytest.raises(values.Refusal, match="config.json"):
            read(str(tmp_path))
    with pytest.raises(values.Refusal, match="neither a file nor a folder"):
        values.recording(str(tmp_path / "config.json"))


@pytest.mark.engine
def test_methods_of_vllm() -> None:
    """vLLM's methods are taken, but for the extraction and a class of one's own, which draft nothing here."""
    from vllm.config.speculative import SpeculativeMethod

    refused = {"extract_hidden_states", "custom_class"}
    for method in {*get_args(SpeculativeMethod)} - refused:
        assert contenders.draft_method(method) == method
    ours = {*contenders.METHODS} - {contenders.ADAPTIVE}
    assert ours <= {*get_args(SpeculativeMethod)}
