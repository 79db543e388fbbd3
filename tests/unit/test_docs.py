"""What the documentation says is what the code does."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from docs.tables import PAGES, TABLES, stale_pages
from tests.robustness.serve_options import serve_parser
from tests.support.specs import diffusion_gemma_spec
from vllm_diffusion.cli import values
from vllm_diffusion.cli.main import build_parser
from vllm_diffusion.drafting.commands.drafts import presets
from vllm_diffusion.drafting.draft_settings import DraftSettings
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.hooks.upstream import read_symbols
from vllm_diffusion.plugin import imported
from vllm_diffusion.requests.arguments import argument_names
from vllm_diffusion.startup.options import sentences
from vllm_diffusion.startup.plugin_settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(page: str, program: str = "vllm") -> list[list[str]]:
    """Every command of a program in the shell blocks of a page, as its arguments."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            # Variables of its environment.
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words[:1] == [program]:
                found.append(words[1:])
    return found


@pytest.mark.engine
def test_tables() -> None:
    """Each table has a page, is current and whole, and names every refused option, replacement, family and rule."""
    texts = [page.read_text("utf-8") for page in PAGES]
    for marker in (r"^<!-- table: (\w+) -->$", r"^<!-- end of (\w+) -->$"):
        shown = [name for text in texts for name in re.findall(marker, text, re.M)]
        # The campaign writes a part of its own.
        assert sorted(set(shown) - {"campaign"}) == sorted(TABLES)
        assert len(shown) == len(set(shown))
    assert [path.name for path in stale_pages()] == [], "run python docs/tables.py --write"
    tables = {name: make() for name, make in TABLES.items()}
    for name, table in tables.items():
        for block in re.findall(r"(?:^\|.*\n)+", table, re.M):
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(cells) == 1, name
    named = {
        "options": set(sentences()),
        "replaced": {symbol.path for symbol in read_symbols() if symbol.use == "replaced"},
        "families": {family.architecture for family in FAMILIES},
        "rules": {name for family in FAMILIES for name in imported(family.engine_config).rules},
    }
    for name, words in named.items():
        assert [word for word in sorted(words) if f"`{word}`" not in tables[name]] == [], name


@pytest.fixture
def machine_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find the files and folders that they name."""
    monkeypatch.setattr(values.os.path, "isfile", lambda path: True)


@pytest.mark.usefixtures("machine_with_everything")
def test_results_can_be_measured_again() -> None:
    """Each table of figures has its commit and machine, and a command whose program is there."""
    results = tomllib.loads(text_of("benchmarks/results.toml"))
    places = results.pop("machines")
    for name, result in results.items():
        assert result["machine"] in places, name
        assert re.fullmatch(r"[0-9a-f]{7}", result["commit"]), name
        assert all(len(row) == len(result["columns"]) for row in result["rows"]), name
        words = [word for word in shlex.split(result["command"]) if "=" not in word]
        if words[0] == "vllm-diffusion":
            build_parser().parse_args(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), name
        else:
            assert words[0] in ("python", "pytest"), name
            assert (ROOT / words[-1 if words[0] == "pytest" else 1]).exists(), name


def test_settings_are_documented() -> None:
    """Every start-up setting and every request argument has its row."""
    names_of_gemma = argument_names(diffusion_gemma_spec(32))
    for page, names in (
        ("docs/use/settings.md", SETTINGS),
        ("docs/use/requests.md", names_of_gemma),
    ):
        assert [name for name in names if f"`{name}`" not in text_of(page)] == []


def test_settings_of_drafts_are_documented() -> None:
    """Each has its row, or is told with what is refused."""
    page = text_of("docs/use/drafts.md")
    names = [each.name for each in fields(DraftSettings)]
    assert [name for name in names if f"| `{name}` |" not in page] == ["reveals"]
    assert '`"reveals": "sampled"` is refused' in page


def test_sampling_parameters_are_documented() -> None:
    """Every field of vLLM's that changes what is sampled has its row."""
    from vllm import SamplingParams

    # How an answer is delivered, not what is in it.
    delivery = {
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "repetition_detection",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
    }
    page = text_of("docs/use/requests.md")
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert [name for name in sorted(names - delivery) if f"`{name}`" not in page] == []


@pytest.mark.engine
def test_counters_are_documented() -> None:
    """Every counter and histogram has its row, and no other."""
    from prometheus_client import Counter, Histogram

    from vllm_diffusion.metrics import instruments

    names = set()
    for metric in chain(*(named.values() for named in instruments())):
        assert isinstance(metric, (Counter, Histogram))
        (family,) = metric.describe()
        names.add(family.name + "_total" * isinstance(metric, Counter))
    rows = re.findall(
        r"^\| `(vllm_diffusion:\w+)`", text_of("docs/operate/observability.md"), re.MULTILINE
    )
    assert sorted(rows) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files(page: Path) -> None:
    """Every file that a page names is there; links are Sphinx's to follow."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|examples|docs|vllm_diffusion|benchmarks)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_named_by_code() -> None:
    """Every page that a message, a comment or a docstring names is there."""
    folders = ("vllm_diffusion", "attention_kernels", "tests", "benchmarks", "examples", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".toml", ".yaml", ".yml")]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*sources, ROOT / "pyproject.toml", ROOT / "THIRD_PARTY_NOTICES"]
        for name in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert sorted(missing) == []


def documented_commands() -> list[list[str]]:
    """Those for vLLM's parser: of all pages, of examples, and of ``vllm-diffusion drafts``."""
    found = [command for page in PAGES for command in commands(page.read_text("utf-8"))]
    for script in sorted(ROOT.glob("examples/**/*.py")):
        lines = re.findall(r"^    (vllm serve .*)", script.read_text("utf-8"), re.MULTILINE)
        found += [shlex.split(line)[1:] for line in lines if not line.endswith("\\")]
    return found + [shlex.split(preset.command)[1:] for preset in presets()]


@pytest.mark.engine
def test_commands_are_understood() -> None:
    """vLLM's own parser takes every command of the documentation, and of ``vllm-diffusion drafts``."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_diffusion.weights.adapters import early_checks

    documented = documented_commands()
    assert len(documented) >= 40
    bench = FlexibleArgumentParser()
    add_cli_args(bench)
    for command in documented:
        if command[0] == "serve":
            serve_parser().parse_args(command[1:])
        else:
            assert command[:2] == ["bench", "serve"], command
            bench.parse_args(command[2:])
    # The next engine of this process would look for the adapters that a page names.
    early_checks._named.clear()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("machine_with_everything")
def test_own_commands_are_understood(page: Path) -> None:
    """Every ``vllm-diffusion`` command of a page parses, on a machine that has what it names."""
    for command in commands(page.read_text(encoding="utf-8"), "vllm-diffusion"):
        build_parser().parse_args(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_of_commands(page: Path) -> None:
    """Each script and module that a page runs is there, and its source has each option that it is given."""
    text = page.read_text(encoding="utf-8")
    for words in commands(text, "pytest"):
        for path in (word for word in words if word.startswith("tests")):
            assert (ROOT / path.partition("::")[0]).exists(), words
    for words in commands(text, "python"):
        if words[0] == "-m":
            module = ROOT / words[1].replace(".", "/")
            script, given = module.with_suffix(".py"), words[2:]
            if module.is_dir():
                script = module / "__main__.py"
        else:
            script, given = ROOT / words[0], words[1:]
        # Options are parsed by the script, or by a file beside it.
        sources = "".join(path.read_text("utf-8") for path in script.parent.glob("*.py"))
        assert script.exists(), words
        # What follows two hyphens alone is another program's.
        own = given[: given.index("--")] if "--" in given else given
        options = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert [option for option in sorted(options) if f'"{option}"' not in sources] == [], words


def test_evaluation_commands() -> None:
    """lm-eval has the tasks of the commands, and sends the server the thinking switch."""
    import lm_eval
    from lm_eval.models.openai_completions import LocalChatCompletion

    page = text_of("docs/use/quantization.md")
    (names,) = re.findall(r"--tasks (\S+)", page)
    files = (Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")
    known = {name for path in files for name in re.findall(r"^task: (\S+)", path.read_text(), re.M)}
    assert set(names.split(",")) <= known
    (gen_kwargs,) = re.findall(r"--gen_kwargs \"(.*)\" ", page)
    settings = json.loads(gen_kwargs.replace('\\"', '"').replace("$THINK", "true"))
    client = LocalChatCompletion(model="model", base_url="http://127.0.0.1:8000")
    payload = client._create_payload(
        [{"role": "user", "content": "a"}], generate=True, gen_kwargs=settings
    )
    assert payload["chat_template_kwargs"] == {"enable_thinking": True}
    assert payload["max_tokens"] == 16384
    assert payload["stop"] == []
