"""The documentation agrees with the code."""

import re
import shlex
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from docs.tables import PAGES, SOURCES, TABLES, stale_pages
from tests.robustness.serve_options import serve_parser
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.cli import values
from vllm_diffusion.cli.main import build_parser
from vllm_diffusion.drafting.presets import presets
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.hooks.upstream import read_symbols
from vllm_diffusion.requests.arguments import argument_names
from vllm_diffusion.startup.options import sentences
from vllm_diffusion.startup.plugin_settings import SETTINGS
from vllm_diffusion.startup.published_checkpoints import checkpoint_families

ROOT = Path(__file__).resolve().parents[2]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(page: str, program: str = "vllm") -> list[list[str]]:
    """Return every command of a program in the shell blocks of a page, as its arguments."""
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
    """Each table has a page, is current, and has every refused option, replacement and family."""
    texts = [page.read_text("utf-8") for page in PAGES]
    for marker in (r"^<!-- table: (\w+) -->$", r"^<!-- end of (\w+) -->$"):
        shown = [name for text in texts for name in re.findall(marker, text, re.M)]
        # The campaign writes parts of its own.
        assert sorted(set(shown) - {"measured", "open"}) == sorted(TABLES)
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
        "rules": {name for family in FAMILIES for name in resolve_name(family.engine_config).rules},
    }
    for name, words in named.items():
        assert [word for word in sorted(words) if f"`{word}`" not in tables[name]] == [], name


def test_sources_of_published_checkpoints() -> None:
    """Each id of a published checkpoint has a source that the page can name, and each is used."""
    rows = [row for family in checkpoint_families() for row in family.checkpoint]
    assert {row.source for row in rows} == SOURCES.keys()


def test_settings_are_documented() -> None:
    """Every start-up setting and every request argument has its row."""
    for page, names in (
        ("docs/use/settings.md", SETTINGS),
        ("docs/use/requests.md", argument_names(diffusion_gemma_spec(32))),
    ):
        assert [name for name in names if f"`{name}`" not in text_of(page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_labelled_lines_stay_apart(page: Path) -> None:
    """Two lines of a paragraph never begin with labels, as they would be rendered as one."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"^[A-Z]\w*: .*\n[A-Z]\w*: .*", text, flags=re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_shown_whole(page: Path) -> None:
    """No table or code line has to be scrolled at a forge's width of 880 pixels."""
    blocks = re.split(
        r"^```\w*\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    code = [line for block in blocks[1::2] for line in block.splitlines()]
    assert [line for line in code if len(line) > 100] == []
    tables = [table for text in blocks[::2] for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]
    assert [table for table in tables if narrowest(table) > 100] == []


def narrowest(table: str) -> int:
    """Return the least width of a table: the longest word of each column, and 3 for margins."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", table).replace("`", "")
    head, _, *rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines())
    # A browser breaks a line at a space and after a hyphen.
    return sum(
        max(len(word) for cell in column for word in re.split(r" |(?<=-)", cell)) + 3
        for column in zip(head, *rows, strict=True)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files(page: Path) -> None:
    """Every file that a page names exists; Sphinx checks the links."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|examples|docs|vllm_diffusion|benchmarks)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def documented_commands() -> list[list[str]]:
    """Return the commands for vLLM's parser of pages, examples and ``vllm-diffusion drafts``."""
    found = [command for page in PAGES for command in commands(page.read_text("utf-8"))]
    for script in sorted(ROOT.glob("examples/**/*.py")):
        lines = re.findall(r"^    (vllm serve .*)", script.read_text("utf-8"), re.MULTILINE)
        found += [shlex.split(line)[1:] for line in lines if not line.endswith("\\")]
    return found + [shlex.split(preset.command)[1:] for preset in presets()]


@pytest.mark.engine
def test_commands_are_understood() -> None:
    """vLLM's parser accepts every command of pages, examples and ``vllm-diffusion drafts``."""
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
def test_own_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``vllm-diffusion`` command of a page parses, if the files that it names exist."""
    monkeypatch.setattr(values.os.path, "isfile", lambda path: True)
    for command in commands(page.read_text(encoding="utf-8"), "vllm-diffusion"):
        build_parser().parse_args(command)


def test_readme_leads_somewhere_from_a_package_index() -> None:
    """The README's links and pictures are absolute once the build has changed them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        build = tomllib.load(file)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/", text)
    for each in build["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text)
