"""Check a vLLM engine's kv_transfer_config for this connector, before vLLM comes to it: that is when the weights are loaded.

Its keys and values, its certificates and keys, and what its kv_role needs. Exit code 0 if the engine would take it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bridge.vllm.errors import BadConfiguration

MAX_BYTES = 1 << 20
ROLES = {"kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="JSON, as it is given to vllm serve --kv-transfer-config")


def run(options: argparse.Namespace) -> int:
    from bridge.vllm.config import ConnectorConfig

    given = _read(options.file)
    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    if (name, module) != ("BridgeConnector", "bridge.vllm.connector"):
        raise BadConfiguration(
            f"kv_connector is {name!r} of kv_connector_module_path {module!r}", remedy='give "BridgeConnector" of "bridge.vllm.connector"'
        )
    role = given.get("kv_role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadConfiguration(f"kv_role is {role!r}", remedy=f"choose one of {', '.join(ROLES)}")
    config = ConnectorConfig.parse(given.get("kv_connector_extra_config", {}))
    config.check_role(*ROLES[role])
    print(f"right: {config.identity.name}, {role}, agent {config.agent}; peers {', '.join(config.peers)}")
    return 0


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    try:
        given = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise BadConfiguration(f"{path} is no JSON: {error}", remedy="correct it; docs/vllm.md has two to paste") from None
    if not isinstance(given, dict):
        raise BadConfiguration(f"{path} holds no JSON object of at most 1 MiB", remedy="docs/vllm.md has two to paste")
    return given
