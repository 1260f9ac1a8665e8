"""Loading ucxx, and asking UCX which transports an endpoint really uses."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import Any

from bridge.transfer.errors import AgentUnavailable

INSTALL = "pip install ucxx-cu12 (ucxx-cu13 where CUDA 13 is installed); both work on hosts without a GPU"

_TRANSPORTS_FIELD = 1 << 3
_MAX_TRANSPORTS = 16


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    """ucp_ep_attr_t of UCX 1.12 and later; its mask keeps it compatible with newer ones."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_uint64 * 16),
        ("remote", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


def load() -> tuple[Any, Any]:
    """ucxx's bindings and its Array. Raises AgentUnavailable. With STARTING held.

    Importing ucxx sets UCX variables in the environment, for every UCX of the process; what it sets is taken back. UCX reads where to write
    its log while it is loaded: standard output, unless told, where it would stand among a program's own.
    """
    before = set(os.environ)
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    try:
        return importlib.import_module("ucxx._lib.libucxx"), importlib.import_module("ucxx._lib.arr").Array
    except ModuleNotFoundError as error:
        if error.name != "ucxx":
            raise AgentUnavailable(f"ucxx cannot be loaded: {error}", remedy=INSTALL) from error
        if importlib.util.find_spec("ucp") is not None:
            raise AgentUnavailable("only ucx-py is installed, which has been discontinued in favour of ucxx", remedy=INSTALL) from error
        raise AgentUnavailable("ucxx is not installed", remedy=INSTALL) from error
    except (ImportError, OSError) as error:  # installed, but its libraries do not load
        raise AgentUnavailable(f"ucxx cannot be loaded: {error}", remedy=INSTALL) from error
    finally:
        for name in set(os.environ) - before:
            if name.startswith("UCX"):  # others are other threads'
                os.environ.pop(name, None)


def transports_of(handle: int) -> list[str]:
    """Such as ["tcp/eth0"], for a living ucp_ep_h; empty where this UCX does not tell."""
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query  # loaded by ucxx; NIXL's own copy has another name
    except (OSError, AttributeError):
        return []
    entries = (_Entry * _MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(field_mask=_TRANSPORTS_FIELD, num_entries=_MAX_TRANSPORTS, entry_size=ctypes.sizeof(_Entry))
    attributes.entries = ctypes.cast(entries, ctypes.POINTER(_Entry))
    query.argtypes, query.restype = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes)), ctypes.c_int
    if query(handle, ctypes.byref(attributes)) != 0:
        return []
    found = [f"{(e.transport or b'').decode()}/{(e.device or b'').decode()}" for e in entries[: attributes.num_entries]]
    return list(dict.fromkeys(found))
