"""The paths that need no key are those of ``docs/operate/security.md`` in every mode."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.engines.routes import MIDDLEWARE, open_paths
from tests.support.engines.server import Server, start_server
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "the-key"
PLUGINS = "vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics"


class Mode(NamedTuple):
    """A start of a server that has the paths of some rows of the page."""

    rows: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


ADAPTERS = Mode(("adapters",), ("--enable-lora",), (("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),))
DEVELOPMENT = Mode(("development",), (), (("VLLM_SERVER_DEV_MODE", "1"),))
SLEEP = DEVELOPMENT._replace(options=("--enable-sleep-mode",))
PAGE = Mode(("page",), (), (("VLLM_PLUGINS", f"{PLUGINS},vllm_diffusion_page"),))
SCALE_OUT = Mode(("scale-out",), ("--enable-scale-out",))
TOKENS_ONLY = Mode(("tokens-only",), ("--tokens-only",))
ALL = Mode(
    ("adapters", "development", "page", "scale-out"),
    (*ADAPTERS.options, *SLEEP.options, *SCALE_OUT.options),
    (*ADAPTERS.variables, *DEVELOPMENT.variables, *PAGE.variables),
)
DRAFT = Mode(
    ("draft",),
    (
        "--speculative-config",
        json.dumps(
            {"method": "dflash", "model": str(shipped_draft()), "num_speculative_tokens": 7}
        ),
        *("--weight-transfer-config", '{"backend": "safetensors"}'),
    ),
    (("VLLM_PLUGINS", f"{PLUGINS},vllm_diffusion_draft"),),
)


def documented(*rows: str) -> set[str]:
    """Return the open paths of a plain server and of these rows."""
    page = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| ([\w-]+)(?: \(.*?\))? \| .*? \| (.*) \|$", page, flags=re.M))
    return {path for row in ("plain", *rows) for path in re.findall(r"`(/[^`]*)`", listed[row])}


@contextmanager
def serving(folder: Path, mode: Mode, checkpoint: Path = SHIPPED) -> Iterator[Server]:
    variables = {"VLLM_API_KEY": KEY, "PYTHONPATH": str(ROOT), **dict(mode.variables)}
    with start_server(
        checkpoint, folder / "log", *MIDDLEWARE, *mode.options, **variables
    ) as server:
        yield server


def test_everything_at_once(tmp_path: Path) -> None:
    """With every mode on, open paths are documented, and adapters need the key."""
    with serving(tmp_path, ALL) as server:
        assert open_paths(server) == documented(*ALL.rows)
        body = {"name": "poet", "src": str(tmp_path / "nowhere")}
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 400)):
            for path in ("/adapters", "//adapters"):
                answer = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
                assert answer.status_code == (status if path == "/adapters" else 404), answer.text
        answer = httpx.delete(f"{server.url}/adapters/poet", timeout=60)
        assert answer.status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [Mode(()), ADAPTERS, DEVELOPMENT, SLEEP, PAGE, SCALE_OUT, TOKENS_ONLY],
    ids=["plain", "adapters", "development", "sleep", "page", "scale-out", "tokens-only"],
)
def test_modes(mode: Mode, tmp_path: Path) -> None:
    """Each mode by itself adds exactly the paths that its row lists."""
    with serving(tmp_path, mode) as server:
        assert open_paths(server) == documented(*mode.rows)


@pytest.mark.slow
def test_drafts(tmp_path: Path) -> None:
    """A server with a replaceable draft has the documented open paths."""
    with serving(tmp_path, DRAFT, shipped_checkpoint("qwen3")) as server:
        assert open_paths(server) == documented(*DRAFT.rows)
