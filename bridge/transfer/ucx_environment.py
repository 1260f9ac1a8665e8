"""What the agents over UCX, nixl and ucx, share: variables of the environment, and which transports are allowed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence

from bridge.transfer.errors import AgentUnavailable

STARTING = threading.Lock()
"""Held while a library is loaded or an agent made: variables are set for that time, and they are the process's."""

DEVICE_READS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""Without it UCX reads from a card of this host over TCP, 0.5 GB/s, unless the card has NVLink: on a single card, for one."""


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables that are not set, for the time of the block."""
    fresh = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in fresh})
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)


def check_transports(transports: Sequence[str] | None) -> None:
    """Raises AgentUnavailable for what cannot be a list of UCX transports."""
    if transports is not None and (not transports or not all(re.fullmatch(r"[\w^:\\/]+", item) for item in transports)):
        raise AgentUnavailable(
            f"{list(transports)!r} is no list of UCX transports", remedy='name them as UCX does, such as ["tcp", "cuda_copy"]'
        )


def allowed_transports(transports: Sequence[str] | None) -> tuple[str | None, str]:
    """(what UCX_TLS is to be, or None for UCX's choice; a sentence that says by whom). The environment wins. With STARTING held."""
    given = os.environ.get("UCX_TLS")
    if given is not None:
        ignored = ", which overrides the configuration" if transports is not None else ""
        return given, f"UCX_TLS={given} from the environment{ignored}"
    if transports is None:
        return None, "UCX chooses among all its transports"
    return ",".join(transports), f"UCX_TLS={','.join(transports)} from the configuration"
