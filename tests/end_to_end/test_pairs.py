"""Every pair of fields is refused by name, or answered with both fields' own laws."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.rows import Pairs, Report, Served
from tests.support.engines.server import PARSERS, Server, start_server
from tests.support.families.cases import CASES
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = pytest.mark.engine

ALL = json.dumps({"diffusion": {"rules": "all"}})
UNO = json.dumps({"architectures": ["UnoQwen3ForCausalLM"]})
HERMES = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]


def report_of(served: Served, num_rows: int | None = None) -> Report:
    """Send the singles, the excluded pairs and the rows of a server."""
    pairs = Pairs(served)
    pairs.singles()
    pairs.excluded()
    pairs.rows(num_rows)
    print(served.url, pairs.report)
    return pairs.report


def test_a_sample_of_pairs(server: Server) -> None:
    """The shipped checkpoint holds the laws of all fields alone and of a sample of their pairs, and
    refuses the pairs of the table, whole and streamed alike.
    """
    report = report_of(Served(server.url, 32), 4)
    assert not report.faults, "\n".join(report.faults)
    assert report.num_pairs > 300
    assert report.num_refused > 50
    server.wait_until_idle()


def _family(name: str, folder: Path, **about: Any) -> tuple[Path, list[str], dict[str, Any]]:
    case = CASES[name]
    model = case.make()
    return model.save(folder / name), case.words, about


SERVERS: dict[str, Any] = {
    "all ways": lambda folder: (
        SHIPPED,
        [*PARSERS, "--additional-config", ALL],
        {"canvas": 32, "ways": ("entropy_bound", "linear_spec", "autoregressive")},
    ),
    # The others are synchronous, as a CPU serves by default.
    "asynchronous": lambda folder: (SHIPPED, [*PARSERS, "--async-scheduling"], {"canvas": 32}),
    "uno": lambda folder: (
        shipped_checkpoint("qwen3"),
        ["--hf-overrides", UNO, "--additional-config", ALL, *HERMES],
        {"canvas": 9, "ways": ("linear_spec", "autoregressive")},
    ),
    "sdar": lambda folder: (
        shipped_checkpoint("sdar"),
        HERMES,
        {"canvas": 8, "is_masked": True, "is_aligned": True},
    ),
    **{
        name: lambda folder, name=name, about=about: _family(name, folder, is_masked=True, **about)
        for name, about in {
            "llada": {"canvas": 32},
            "llada2.1": {"canvas": 32, "is_aligned": True},
            "fast-dllm": {"canvas": 32, "is_aligned": True},
            "a2d": {"canvas": 32},
        }.items()
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_every_pair(name: str, tmp_path: Path) -> None:
    """All pairs of each kind of server are refused by the table, or hold both laws."""
    checkpoint, options, about = SERVERS[name](tmp_path)
    more = ["--max-num-seqs", "8"]
    with start_server(checkpoint, tmp_path / "server.log", *options, *more) as running:
        report = report_of(Served(running.url, **about))
        assert not report.faults, "\n".join(report.faults)
        assert report.num_answered > report.num_refused / 4 > 0
        running.assert_alive()
