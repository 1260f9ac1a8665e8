"""The command line. Each subcommand is one module with `add_arguments` and `run`; failures are one sentence and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bridge import __version__
from bridge.cli import demo, identity, inspect
from bridge.errors import KVBridgeError

COMMANDS = (demo, inspect, identity)
USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """One sentence and no usage block: `--help` has the rest."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The whole command's parser."""
    top = _Parser(prog="kvbridge", description="Carries a request's KV cache from one vendor's accelerator to another's.")
    top.add_argument("--version", action="version", version=f"kvbridge {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for module in COMMANDS:
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(module.__name__.rsplit(".", 1)[1], help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 where something that was checked is not so, 2 where it could not run."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (KVBridgeError, OSError) as error:
        print(f"kvbridge {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"kvbridge {options.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
