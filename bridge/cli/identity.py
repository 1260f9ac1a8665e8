"""Make an engine's certificate and private key.

Copy the .crt file to each peer's host and name it there; the .key file stays on this host.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bridge.errors import KVBridgeError
from bridge.handoff.identity import create_identity


class BadName(KVBridgeError):
    """A name that cannot be a file's."""

    clause = "bad_name"
    remedy = "use letters, digits, dots, dashes and underscores, 64 at most"


class WouldReplace(KVBridgeError):
    """A key of this name exists."""

    clause = "would_replace"
    remedy = "choose another name or folder, or move the old key away yourself"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="the engine's name, by which its peers' configurations know it")
    command.add_argument(
        "--out", type=Path, default=Path("."), metavar="FOLDER", help="where to write both files; made if it is not there (default: here)"
    )


def run(options: argparse.Namespace) -> int:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", options.name):
        raise BadName(f"{options.name!r} cannot be a name")
    if options.out.exists() and not options.out.is_dir():
        raise NotADirectoryError(20, "not a folder", str(options.out))
    try:
        made = create_identity(options.name, options.out)
    except FileExistsError as error:
        raise WouldReplace(f"{error.filename} exists already") from None
    print(f"certificate {made.certificate} (for your peers)\nprivate key {made.private_key} (stays here)")
    return 0
