"""An agent's name, which it tells its peers."""

from __future__ import annotations

from bridge.transfer.errors import AgentUnavailable

MAX_NAME_BYTES = 128


def check_name(name: str) -> None:
    """Raises AgentUnavailable."""
    if not 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES or name != name.encode("utf-8", "replace").decode():
        raise AgentUnavailable(f"an agent's name has 1 to {MAX_NAME_BYTES} bytes of UTF-8", remedy="choose another name")
