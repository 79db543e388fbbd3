"""Tests of the list of vLLM's symbols that are relied on, and of its comparison with vLLM."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.commands import run
from vllm_diffusion.hooks import __main__ as command
from vllm_diffusion.hooks import upstream

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_scan(tmp_path: Any) -> None:
    """A scan in a fresh process finds exactly the symbols of the committed file."""
    path = tmp_path / "signatures.json"
    script = (
        "from pathlib import Path; from tests.support import vllm_symbols;"
        f"vllm_symbols.write(Path({str(path)!r}))"
    )
    run(sys.executable, "-c", script, timeout=300)
    found = json.loads(path.read_text(encoding="utf-8"))
    committed = json.loads(upstream.SIGNATURES.read_text(encoding="utf-8"))
    assert found == committed, "run python -m tests.support.vllm_symbols"


def test_replacements_are_explained() -> None:
    """Each replacement has a sentence for its reason and one for what would end it."""
    replaced = [symbol for symbol in upstream.read_symbols() if symbol.use == "replaced"]
    assert replaced
    for symbol in replaced:
        assert symbol.reason.endswith("."), symbol.path
        assert symbol.until.endswith("."), symbol.path


def test_symbols_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker is checked only on a CPU platform."""
    from vllm.platforms import current_platform

    assert any("cpu_worker" in symbol.path for symbol in upstream.symbols_here())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    elsewhere = upstream.symbols_here()
    assert elsewhere
    assert not [symbol.path for symbol in elsewhere if "cpu" in symbol.path.partition(":")[0]]


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with 0 and a count, or with 1 and the difference of each moved symbol."""
    assert command.main() == 0
    symbols = upstream.read_symbols()
    total = len(symbols)
    assert f"{total} of {total} symbols as known" in capsys.readouterr().out

    gone = dataclasses.replace(symbols[0], path="vllm.sampling_params:NoSuchThing", signature="(a)")
    monkeypatch.setattr(upstream, "read_symbols", lambda: (*symbols, gone))
    assert command.main() == 1
    output = capsys.readouterr().out
    assert f"{total} of {total + 1} symbols as known" in output
    assert f"{gone.path}\n  was: (a)\n  now: missing" in output


def test_missing_package() -> None:
    """A symbol whose module needs a package that is not installed has not moved."""
    assert upstream.signature_of("no_such_package.module:x") == "needs no_such_package"


def test_a_module_that_names_what_an_optional_package_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbol whose annotation needs a missing package, such as Ray, has not moved."""
    (tmp_path / "annotated_by_ray.py").write_text(
        "class Handle:\n    reference: ObjectRef | None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "annotated_by_ray:Handle"
    assert upstream.signature_of(path) == "needs ObjectRef"
    assert upstream.moved_symbols([upstream.Symbol(path, "replaced", "(self)", ("a.py",))]) == []
    symbol = upstream.Symbol("no_such_package.module:x", "called", "(a)", ("plugin.py",))
    assert upstream.moved_symbols([symbol]) == []
