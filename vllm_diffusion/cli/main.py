"""The ``vllm-diffusion`` command."""

import os
import sys
from importlib.metadata import version

from vllm_diffusion.checkpoints import InstallationError
from vllm_diffusion.cli import chat, checkpoint, demo, doctor, models, serve_page
from vllm_diffusion.cli.console import CommandError, fail
from vllm_diffusion.cli.values import Parser, UsageError
from vllm_diffusion.hooks.own_entry_points import own_entry_points
from vllm_diffusion.startup.environment import compile_once


def build_parser() -> Parser:
    parser = Parser(
        prog="vllm-diffusion",
        description="Diffusion LLMs on stock vLLM. To serve one, run `vllm serve` as usual.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('vllm-diffusion')}"
    )
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    registered = [entry.load() for entry in own_entry_points("vllm_diffusion.commands")]
    for module in (demo, chat, serve_page, models, checkpoint, *registered, doctor):
        module.add_parser(subcommands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        Its exit status: 0 only if it did what it is for.

    Raises:
        SystemExit: With status 2 if the command line cannot be carried out as it was typed.
    """
    compile_once()
    parser = build_parser()
    command_line = sys.argv[1:] if argv is None else argv
    arguments, rest = parser.parse_known_args(command_line)
    if "vllm_options" in arguments and (not rest or rest[0].startswith("-")):
        # A command that starts an engine hands on what it does not know.
        arguments.vllm_options = rest
    elif rest:
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        arguments.parser.error(str(error))
    except (CommandError, InstallationError) as error:
        return fail(str(error))
    except BrokenPipeError:
        # The reader of our output is gone; Python must not complain about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
