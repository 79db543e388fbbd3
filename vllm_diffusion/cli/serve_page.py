"""``vllm-diffusion serve-page``: ``vllm serve`` with the page of the live canvas."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.cli.console import fail, say
from vllm_diffusion.cli.server import SERVER_ENVIRONMENT, VLLM_SERVE
from vllm_diffusion.settings.environment import environment_flags

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_PAGE = "vllm_diffusion_page"
_OURS = ("vllm_diffusion", "vllm_diffusion_cpu", "vllm_diffusion_metrics", _PAGE)
_PATH = "/diffusion/"
_HOST, _PORT = "127.0.0.1", "8000"


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "serve-page",
        help="run `vllm serve` with a page that shows canvases live",
        description="Run `vllm serve` with the page of the live canvas, on this machine only unless "
        "--host says otherwise. Sets VLLM_PLUGINS, without which vLLM loads no page, and says so. The "
        "page asks for the key of VLLM_API_KEY or --api-key.",
        usage="%(prog)s [-h] [MODEL] [OPTION ...]",
        # Options are those of `vllm serve`, wherever they stand.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="MODEL, OPTION",
        help="of `vllm serve`; the default model is the shipped checkpoint",
    )
    parser.set_defaults(run=run, print_help=parser.print_help)


def run(arguments: argparse.Namespace) -> int:
    if arguments.arguments[:1] in (["-h"], ["--help"]):
        arguments.print_help()
        return 0
    if environment_flags().disabled:
        return fail("VLLM_DIFFUSION_DISABLE=1 turns vllm-diffusion off; unset it.")
    try:
        options, url = serve_options(arguments.arguments)
    except FileNotFoundError as error:
        return fail(str(error))
    plugins = ",".join(allowed_plugins(os.environ))
    say(f"The page: {url}")
    say(f"VLLM_PLUGINS={plugins}")
    environment = os.environ | SERVER_ENVIRONMENT | {"VLLM_PLUGINS": plugins}
    # The server takes this process's place, and its signals.
    return os.execve(sys.executable, [*VLLM_SERVE, *options], environment)


def serve_options(arguments: list[str]) -> tuple[list[str], str]:
    """What ``vllm serve`` is given, and the address of the page.

    Args:
        arguments: A model or nothing, and options of ``vllm serve``.

    Raises:
        FileNotFoundError: If the model is to be the shipped checkpoint, and that is incomplete.
    """
    options = list(arguments)
    if not options or options[0].startswith("-"):
        options.insert(0, str(shipped_checkpoint()))
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--host", "--port", "--root-path", "--ssl-certfile"):
        known.add_argument(name)
    set_to, _ = known.parse_known_args(options)
    if set_to.host is None:
        options += ["--host", _HOST]
    host = set_to.host or _HOST
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    if ":" in host:
        host = f"[{host}]"
    scheme = "http" if set_to.ssl_certfile is None else "https"
    path = (set_to.root_path or "").rstrip("/") + _PATH
    return options, f"{scheme}://{host}:{set_to.port or _PORT}{path}"


def allowed_plugins(environment: Mapping[str, str]) -> list[str]:
    """What ``VLLM_PLUGINS`` must name for the page, and for what it allows without.

    Unset it allows the plugins of all groups but that of pages; set, only those that it names.

    Args:
        environment: Of the process.
    """
    named = environment.get("VLLM_PLUGINS")
    if named is not None:
        allowed = [name for name in named.split(",") if name]
    else:
        groups = entry_points()
        names = {
            plugin.name
            for group in groups.groups
            if group.startswith("vllm.") and group != "vllm.endpoint_plugins"
            for plugin in groups.select(group=group)
        }
        allowed = sorted(names - set(_OURS))
    return list(dict.fromkeys([*allowed, *_OURS]))
