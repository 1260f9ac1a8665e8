"""Loading NIXL: whichever of its packages is installed, why UCX refuses where it does, and which transport it chose."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from bridge.transfer import errors
from bridge.transfer.errors import AgentUnavailable
from bridge.transfer.ucx_environment import DEVICE_READS, STARTING, allowed_transports, environment

MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
INSTALL = "pip install nixl-cu12 (nixl-cu13 where CUDA 13 is installed); both work on hosts without a GPU"
BACKEND = ["UCX"]
USER_TIMEOUT = 7
"""Seconds after which UCX gives up a TCP connection whose bytes nobody acknowledges: as long as a control channel may be silent. An
operator's UCX_TCP_USER_TIMEOUT overrides it. Older UCX (1.21's own packages, for one) does not know it."""
WAKE_MICROSECONDS = 10_000
"""How long the library's thread sleeps without an event. Its Python API asks for 0, with which the thread never sleeps and each idle agent
takes a whole core (measured). Some transports of UCX want to be looked at now and then, so it is not for ever."""


_LOOK_BYTES = 1 << 20


class UcxLog:
    """UCX's own log, which alone tells the transport that it chose. Kept out of the terminal in a nameless temporary file."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self._lock = threading.Lock()
        self._at = 0
        self._rest = b""
        self._agent = self._scope = ""
        self._reading = False
        self._found: dict[str, dict[str, list[str]]] = {}  # by agent and kind of link

    @contextlib.contextmanager
    def opened_while_loading(self) -> Iterator[None]:
        """UCX opens its log when it is loaded, once a process; an operator's own settings are left alone."""
        loaded = any(name in sys.modules for name in MODULES)
        if loaded or any(name in os.environ for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO")):
            yield
            return
        handle, path = tempfile.mkstemp(prefix="kvbridge-ucx-", suffix=".log")
        os.close(handle)
        try:
            with environment({"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": path, "UCX_PROTO_INFO": "y"}):
                yield
            self.fd = os.open(path, os.O_RDONLY)  # read for as long as the process lives
        finally:
            os.unlink(path)

    def chosen(self, native: str) -> list[str]:
        """For each kind of link that the agent `native` has read over: which transports UCX's protocol table names for ucp_get.

        Looks at what was written since it was last asked, at most 1 MiB: it may be asked on an event loop.
        """
        if self.fd is None:
            return []
        with self._lock:
            ctypes.CDLL(None).fflush(None)  # UCX's stream is buffered
            written = os.pread(self.fd, _LOOK_BYTES, self._at)
            self._at += len(written)
            *lines, self._rest = (self._rest + written).split(b"\n")
            for line in lines:
                self._learn(line.decode(errors="replace"))
            found = self._found.get(native, {})
            return [f"{scope}: {', '.join(ways)}" for scope, ways in found.items() if scope != "self"]

    def _learn(self, line: str) -> None:
        row = line.partition("]   ")[2].strip()
        if row.startswith("+"):
            return
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 1:
            head = re.fullmatch(r"(kv[0-9a-f]{14}) (.+) cfg#\d+", cells[0])
            if head:
                self._agent, self._scope, self._reading = head[1], head[2], False
            elif " by ucp_" in cells[0]:
                self._reading = bool(self._scope) and "read by ucp_get" in cells[0]
            elif "cfg#" in cells[0]:
                self._scope, self._reading = "", False
        elif self._reading and len(cells) == 3 and cells[0] != "Range":
            ways = self._found.setdefault(self._agent, {}).setdefault(self._scope, [])
            text = f"{cells[2]} ({cells[1]})"
            if text not in ways:
                ways.append(text)


UCX_LOG = UcxLog()


def load() -> Any:
    """NIXL's Python API. Raises AgentUnavailable."""
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name not in (name, f"{name}._api"):
                reasons.append(f"{name}: {error}")
        except (ImportError, OSError) as error:  # installed, but its libraries do not load
            reasons.append(f"{name}: {error}")
    detail = "NIXL cannot be loaded: " + "; ".join(reasons) if reasons else "NIXL is not installed"
    raise AgentUnavailable(detail, remedy=INSTALL)


@contextlib.contextmanager
def _thread_that_sleeps(bindings: Any) -> Iterator[None]:
    """Agents made in the block have a progress thread that sleeps; where the bindings are of another make, it does as it likes."""
    config = getattr(bindings, "nixlAgentConfig", None)
    delay = getattr(config, "pthrDelay", None)
    if config is None or not isinstance(delay, property) or delay.fset is None:
        yield
        return
    write = delay.fset
    made = type("nixlAgentConfig", (config,), {"pthrDelay": property(delay.fget, lambda self, _: write(self, WAKE_MICROSECONDS))})
    bindings.nixlAgentConfig = made
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config


def start(name: str, transports: Sequence[str] | None, serves: bool) -> tuple[Any, ModuleType, str]:
    """(a native agent of that name, the module of its exceptions, a sentence on the transports allowed). Raises AgentUnavailable.

    transports: UCX's, used where the environment has no UCX_TLS. serves: whether a thread of the library answers peers.
    """
    variables = {"NIXL_LOG_LEVEL": "FATAL", "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_TCP_USER_TIMEOUT": f"{USER_TIMEOUT}s", **DEVICE_READS}
    with STARTING, contextlib.ExitStack() as for_now:
        tls, allowed = allowed_transports(transports)
        if tls is not None:
            variables["UCX_TLS"] = tls
        for_now.enter_context(UCX_LOG.opened_while_loading())
        for_now.enter_context(environment(variables))
        api = load()
        bindings = importlib.import_module(api.__name__.replace("_api", "_bindings"))
        reason = None
        try:
            with _thread_that_sleeps(bindings):
                native = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=serves, backends=BACKEND))
            if "UCX" not in native.backends:
                reason = "this NIXL has no UCX back end"
        except Exception as error:  # the bindings raise types of their own and RuntimeError
            reason = said(error)
    if reason is not None:
        reason = why_ucx_refuses(api.__name__, tls) or reason
        raise AgentUnavailable(
            f"NIXL's UCX back end refuses to start ({allowed}): {reason}",
            remedy="correct UCX_TLS or the configured transports (a host with an NVIDIA GPU needs cuda_copy among them), or " + INSTALL,
        )
    return native, bindings, allowed


_PROBE = """
import importlib, sys
api = importlib.import_module(sys.argv[1])
agent = api.nixl_agent("probe", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
sys.exit(0 if "UCX" in agent.backends else 3)
"""


def why_ucx_refuses(module: str, tls: str | None) -> str:
    """NIXL's exception says only NIXL_ERR_BACKEND; the reason is in what the libraries print, so a fresh process is asked."""
    with STARTING:
        variables = dict(os.environ, UCX_LOG_LEVEL="warn", NIXL_LOG_LEVEL="ERROR")
    variables.pop("UCX_LOG_FILE", None)
    if tls is not None:
        variables["UCX_TLS"] = tls
    try:
        probe = subprocess.run([sys.executable, "-c", _PROBE, module], env=variables, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in (probe.stdout + probe.stderr).splitlines() if re.search(r"UCX +(WARN|ERROR)|^E\d", line)]
    words = [re.sub(r"^.*?(UCX +(WARN|ERROR) +|\] )", "", line, count=1).strip() for line in lines]
    words = [text for text in dict.fromkeys(words) if not text.startswith("createBackend")]
    return "; ".join(words[:4])


def said(error: Exception) -> str:
    """The library's reason in a few words."""
    text = errors.said(error)
    return f"the peer is gone ({text})" if type(error).__name__ == "nixlRemoteDisconnectError" else text
