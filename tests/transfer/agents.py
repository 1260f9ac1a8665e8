"""The agents that the suite runs over, each made the same way. TCP only, so that all three cross the same kind of link."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.handoff.identity import Identity, PeerConfig, create_identity

KINDS = ("nixl", "ucx", "stream")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Made by whoever makes identities, and by nobody else: serving processes are killed, and would leave theirs behind."""
    return tempfile.TemporaryDirectory(prefix="kvbridge-tests-")


def identities() -> dict[str, str]:
    """Files of two identities, "owner" and "reader", made once a process: what a serving process is told."""
    folder = Path(_folder().name)
    for name in ("owner", "reader", "stranger"):
        if not (folder / f"{name}.crt").exists():
            create_identity(name, folder)
    return {name: str(folder / name) for name in ("owner", "reader", "stranger")}


def make(kind: str, name: str, *, serves: bool, files: Mapping[str, str], **settings: Any) -> Any:
    """An agent of a kind. files: as `identities` returns them; the owner trusts the reader, the reader the owner."""
    if kind != "nixl":
        settings = {"connect_seconds": 20.0} | settings  # machines that run tests are busy
    if kind == "nixl":
        from bridge.transfer.nixl import NixlAgent

        return NixlAgent(name, serves=serves, **({"transports": ["tcp"]} | settings))
    if kind == "ucx":
        from bridge.transfer.ucx import UcxAgent

        return UcxAgent(name, serves=serves, **({"transports": ["tcp"]} | settings))
    from bridge.transfer.stream import StreamAgent

    me, other = ("owner", "reader") if serves else ("reader", "owner")
    settings.pop("in_flight_bytes", None)  # nothing of it can arrive late
    identity = Identity(me, Path(files[me] + ".crt"), Path(files[me] + ".key"))
    return StreamAgent(name, identity, {other: PeerConfig(Path(files[other] + ".crt"), "127.0.0.1")}, serves=serves, **settings)
