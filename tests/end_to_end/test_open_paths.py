"""The paths that need no key are those of ``docs/operate/security.md`` in every mode."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.engines.server import Server, start_server
from tests.support.engines.tiny_pair import SWAPS, SWAPS_PLUGINS, dflash
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "the-key"
PLUGINS = "vllm_diffusion,vllm_diffusion_cpu,vllm_diffusion_metrics"
ROUTES = "/routes-of-this-server"
MIDDLEWARE = ("--middleware", f"{__name__}.ListRoutes")


class ListRoutes:
    """Middleware of a server that lists every path of its application."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != ROUTES:
            await self.app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        paths = sorted({route.path for route in scope["app"].routes})
        await JSONResponse(paths)(scope, receive, send)


def open_paths(server: Server) -> set[str]:
    """Return the paths that are not refused without a key.

    Requests have a method that none of them supports, so that nothing is done.
    """
    found = set()
    for path in httpx.get(f"{server.url}{ROUTES}", timeout=60).json():
        answer = httpx.request("TRACE", server.url + re.sub(r"{.*?}", "x", path), timeout=60)
        assert answer.status_code != 200 or path == "/metrics", path
        if answer.status_code != 401:
            found.add(path)
    return found


class Mode(NamedTuple):
    """A start of a server that has the paths of some rows of the page."""

    rows: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    checkpoint: Path = SHIPPED


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
    ("--speculative-config", json.dumps(dflash()), *SWAPS),
    (("VLLM_PLUGINS", SWAPS_PLUGINS),),
    shipped_checkpoint("qwen3"),
)


def documented(*rows: str) -> set[str]:
    """Return the open paths of a plain server and of these rows."""
    page = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| ([\w-]+)(?: \(.*?\))? \| .*? \| (.*) \|$", page, flags=re.M))
    return {path for row in ("plain", *rows) for path in re.findall(r"`(/[^`]*)`", listed[row])}


@contextmanager
def serving(folder: Path, mode: Mode) -> Iterator[Server]:
    variables = {"VLLM_API_KEY": KEY, "PYTHONPATH": str(ROOT), **dict(mode.variables)}
    options = (*MIDDLEWARE, *mode.options)
    with start_server(mode.checkpoint, folder / "log", *options, **variables) as server:
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
    [Mode(()), ADAPTERS, DEVELOPMENT, SLEEP, PAGE, SCALE_OUT, TOKENS_ONLY, DRAFT],
    ids=["plain", "adapters", "development", "sleep", "page", "scale-out", "tokens-only", "draft"],
)
def test_modes(mode: Mode, tmp_path: Path) -> None:
    """Each mode by itself adds exactly the paths that its row lists."""
    with serving(tmp_path, mode) as server:
        assert open_paths(server) == documented(*mode.rows)
