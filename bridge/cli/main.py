"""The command line. Each subcommand is one module with `add_arguments` and `run`; failures are one sentence and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from bridge import __version__
from bridge.cli import check, demo, doctor, identity, inspect
from bridge.errors import KVBridgeError, printable

COMMANDS = (demo, inspect, identity, check, doctor)
USAGE_ERROR = 2

_MISNAMED = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class _Parser(argparse.ArgumentParser):
    """One sentence and no usage block: `--help` has the rest."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(USAGE_ERROR, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole command's parser, and each subcommand's by name."""
    top = _Parser(prog="kvbridge", description="Carries a request's KV cache from one vendor's accelerator to another's.")
    top.add_argument("--version", action="version", version=f"kvbridge {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    by_name: dict[str, argparse.ArgumentParser] = {}
    for module in COMMANDS:
        name = module.__name__.rsplit(".", 1)[1]
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = by_name[name] = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top, by_name


def _complain(sentence: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # its reader has gone, or its disk is full
            print(sentence, file=sys.stderr, flush=True)


def _flush() -> bool:
    """Whether everything that was printed has left; a reader that went away is nobody's fault, but must not end in a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(f"kvbridge: standard output cannot be written: {(error.strerror or str(error)).lower()}")
        # The interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 where something that was checked is not so, 2 where it could not run."""
    top, by_name = parsers()
    if sys.stdout is None:  # closed by whoever started this
        _complain("kvbridge: standard output is closed, so nothing can be said there")
        return USAGE_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks, or a file name that is not UTF-8, is no reason for a traceback. Under
        # PYTHONUNBUFFERED a write that fails would fail inside argparse, which does not say so.
        sys.stdout.reconfigure(errors="backslashreplace", write_through=False)
    try:
        options, unknown = top.parse_known_args(arguments)
    except SystemExit:
        if not _flush():
            return USAGE_ERROR
        raise
    if unknown:
        by_name[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = int(options.run(options))
        return code if _flush() else USAGE_ERROR
    except KVBridgeError as error:
        return _say(options.command, str(error))
    except OSError as error:
        named = f"{error.filename}: {(error.strerror or '').lower()}" if error.filename else str(error)
        if isinstance(error, PermissionError):
            named += "; give this user the right, as root, or name another place"
        elif isinstance(error, _MISNAMED):
            named += "; correct the path"
        return _say(options.command, named)


def _say(command: str, sentence: str) -> int:
    _complain(f"kvbridge {command}: {printable(' '.join(sentence.split()))}")
    _flush()
    return USAGE_ERROR
