"""``vllm-diffusion serve-page``: ``vllm serve`` with the page of the live canvas."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import MODEL_NAME, begin_serving
from vllm_diffusion.cli.client import ServerError
from vllm_diffusion.cli.console import VERBOSE_HELP, say
from vllm_diffusion.cli.server import VLLM_SERVE, Server

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_PAGE = "vllm_diffusion_page"
_OURS = ("vllm_diffusion", "vllm_diffusion_cpu", "vllm_diffusion_metrics", _PAGE)
_PATH = "/diffusion/"
_HOST, _PORT = "127.0.0.1", 8000
# Hosts that stand for all addresses of this machine.
_ALL_ADDRESSES = ("0.0.0.0", "::")
# Options of `vllm serve` with which no browser finds the page.
_OPEN_HELP = (
    "open the page in a browser when it answers; never as root, over ssh or without a terminal"
)
_WITHOUT_A_PORT = ("--headless", "--uds", "--grpc")


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "serve-page",
        help="run `vllm serve` with a page that shows canvases live",
        description="Run `vllm serve` with the page of the live canvas, on this machine only unless "
        "--host is set. Sets VLLM_PLUGINS, without which vLLM loads no page, and prints that it does. The "
        "page asks for the key of VLLM_API_KEY or --api-key. A model in a folder is served under the "
        "folder's name, the shipped checkpoint as tiny, unless --served-model-name is set. Ctrl-C ends the server.",
        usage="%(prog)s [-h] [--open] [--verbose] [MODEL] [OPTION ...]",
        epilog="All other options are those of `vllm serve`, and are handed on.",
        # vLLM's options stand anywhere among ours, with values that only vLLM's parser knows.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="MODEL",
        help="what `vllm serve` takes; default: the shipped checkpoint",
    )
    # In the help only: `plan_of` reads them.
    for option, meaning in (("--open", _OPEN_HELP), ("--verbose", VERBOSE_HELP)):
        parser.add_argument_group(option, meaning)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Plan:
    """Arguments and addresses of a server of the page.

    Attributes:
        options: What ``vllm serve`` is given, the model first.
        host: Where the server listens.
        port: Where the server listens.
        url: Address at which this process asks whether the server is ready.
        shutdown_seconds: Time that the server gives its open requests when it is interrupted.
        page: The address of the page, for a browser.
        opens: Whether the page is to be opened in a browser.
        is_verbose: Whether the server's own lines are printed.
    """

    options: tuple[str, ...]
    host: str
    port: int
    url: str
    shutdown_seconds: float
    page: str
    opens: bool
    is_verbose: bool


def run(arguments: argparse.Namespace) -> int:
    if arguments.arguments[:1] in (["-h"], ["--help"]):
        arguments.parser.print_help()
        return 0
    begin_serving()
    plan = plan_of(arguments.arguments)
    check_free(plan.host, plan.port)
    plugins = ",".join(allowed_plugins(os.environ))
    say(f"The page will be at {plan.page}")
    say(f"VLLM_PLUGINS={plugins}")
    problem = browser_problem(os.environ) if plan.opens else None
    if problem is not None:
        say(f"--open: {problem}, so no browser is opened; open the address yourself.")
    server = Server(
        [*VLLM_SERVE, *plan.options],
        report=say,
        environment={"VLLM_PLUGINS": plugins},
        url=plan.url,
        shutdown_seconds=plan.shutdown_seconds,
        verbose=plan.is_verbose,
    )
    try:
        with server:
            try:
                say(f"The page answers: {plan.page} (Ctrl-C ends the server)")
                if plan.opens and problem is None:
                    open_browser(plan.page)
                server.wait()
            except KeyboardInterrupt:
                # This is how a server that has served is ended.
                say("Ending the server.")
    except ServerError:
        say(server.log_end())
        raise
    return 0


def plan_of(arguments: Sequence[str]) -> Plan:
    """Read what a command line asks for.

    Args:
        arguments: A model or nothing, and options: ours and those of ``vllm serve``.

    Raises:
        UsageError: If an option that the page depends on is of no use here.
        InstallationError: If the model is to be the shipped checkpoint, and that is incomplete.
    """
    options = [each for each in arguments if each not in ("--open", "--verbose")]
    for name in _WITHOUT_A_PORT:
        if any(option.partition("=")[0] == name for option in options):
            raise values.UsageError(f"{name}: a browser needs an HTTP port; leave it out.")
    # Otherwise vLLM calls a model by its path.
    if not options or options[0].startswith("-"):
        options.insert(0, str(shipped_checkpoint()))
        served_as: str | None = MODEL_NAME
    else:
        served_as = Path(options[0]).resolve().name if Path(options[0]).is_dir() else None
    set_to = _set_to(options)
    # A file of options may hold a name, which one on the command line would replace.
    if served_as and set_to.served_model_name is None and set_to.config is None:
        options += ["--served-model-name", served_as]
    if not set_to.host:
        options += ["--host", _HOST]
    host = set_to.host or _HOST
    scheme = "http" if set_to.ssl_certfile is None else "https"
    here, shown = (_HOST, "localhost") if host in _ALL_ADDRESSES else (host, host)
    path = (set_to.root_path or "").rstrip("/") + _PATH
    return Plan(
        tuple(options),
        host,
        set_to.port,
        f"{scheme}://{_authority(here, set_to.port)}",
        set_to.shutdown_timeout,
        f"{scheme}://{_authority(shown, set_to.port)}{path}",
        "--open" in arguments,
        "--verbose" in arguments,
    )


def _set_to(options: Sequence[str]) -> argparse.Namespace:
    """Read the model, and the options of ``vllm serve`` that decide where the page is and how the
    server ends.
    """
    parser = values.Parser(prog="vllm-diffusion serve-page", add_help=False, allow_abbrev=False)
    parser.add_argument("MODEL", type=values.model)
    parser.add_argument("--host")
    parser.add_argument("--port", type=values.integer(1, 65_535), default=_PORT)
    # vLLM takes an underscore for a hyphen.
    parser.add_argument("--root-path", "--root_path")
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+")
    parser.add_argument("--config")
    parser.add_argument("--ssl-certfile", "--ssl_certfile", type=values.file)
    parser.add_argument(
        "--shutdown-timeout", "--shutdown_timeout", type=values.number(0), default=0.0
    )
    return parser.parse_known_args(options)[0]


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Look whether a server can listen at an address.

    Raises:
        UsageError: If it is not an address of this machine, or another program has it.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            # As vLLM's own: an address whose connections have just ended is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise values.UsageError(
                f"--port {port}: {error.strerror}; choose another one with --port."
            ) from None
        raise values.UsageError(
            f"--host {host} must be an address of this machine ({error.strerror})."
        ) from None


def browser_problem(environment: Mapping[str, str]) -> str | None:
    """Return why no browser is opened here; ``None`` if one may be.

    Args:
        environment: The variables of this process.
    """
    if os.geteuid() == 0:
        return "this is root"
    if any(name.startswith("SSH_") for name in environment):
        return "this is a session over ssh"
    if not sys.stderr.isatty():
        return "this is not a terminal"
    if not any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        # Python would open one that draws in this terminal.
        return "there is no display"
    return None


def open_browser(address: str) -> None:
    """Open an address in the user's browser, which gets no key: not in it, and not in its
    environment.
    """
    environment = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
    subprocess.Popen(
        [sys.executable, "-m", "webbrowser", address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def allowed_plugins(environment: Mapping[str, str]) -> list[str]:
    """Return what ``VLLM_PLUGINS`` must name for the page, and for what it allows without.

    Unset it allows the plugins of all groups but that of pages; set, only those that it names.

    Args:
        environment: The variables of this process.
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
