"""Check a vLLM engine's kv_transfer_config for this connector, before vLLM comes to it: that is when the weights are loaded.

Its keys and values, its certificates and keys, and what its kv_role needs; it connects to nobody and starts nothing. Exit code 0 if the
engine would take the file; what may be wrong on this host, with names or with rights, is noted.
"""

from __future__ import annotations

import argparse
import codecs
import json
import socket
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from bridge.errors import printable
from bridge.vllm.errors import BadConfiguration

if TYPE_CHECKING:
    from bridge.vllm.config import ConnectorConfig

MAX_BYTES = 1 << 20
MAX_REPEATED = 8
"""Keys that stand twice, of which a note is made."""

ROLES = {"kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}
"""vLLM's values of kv_role: whether such an engine produces, and whether it consumes."""

FIELDS: dict[str, Any] = {
    "kv_connector": str | None,
    "engine_id": str | None,
    "kv_buffer_device": str,
    "kv_role": Literal["kv_producer", "kv_consumer", "kv_both"],
    "kv_port": int,
    "kv_connector_extra_config": dict[str, Any],
    "kv_connector_module_path": str | None,
    "enable_permute_local_kv": bool,
    "kv_load_failure_policy": Literal["recompute", "fail"],
}
"""The fields of vLLM 0.32's KVTransferConfig and what each takes; vLLM itself need not be here."""

_INSTEAD = {
    str | None: "give a text",
    str: "give a text",
    int: "give a whole number",
    bool: "give true or false",
    dict[str, Any]: "give an object of keys and values",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="JSON, as it is given to vllm serve --kv-transfer-config")


def run(options: argparse.Namespace) -> int:
    from bridge.vllm.config import ConnectorConfig, shown

    repeated: list[str] = []
    given = read(options.file, repeated)
    check_fields(given)
    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    if (name, module) != ("BridgeConnector", "bridge.vllm.connector"):
        raise BadConfiguration(
            f"kv_connector is {shown(name)} of kv_connector_module_path {shown(module)}",
            remedy='give "BridgeConnector" of "bridge.vllm.connector"',
        )
    role = given.get("kv_role")
    if role is None:
        raise BadConfiguration("kv_role is missing", remedy=f"choose one of {', '.join(ROLES)}")
    config = ConnectorConfig.parse(given.get("kv_connector_extra_config", {}))
    config.check_role(*ROLES[role])
    print(printable(f"right: {config.identity.name}, {role}, agent {config.agent}; peers {', '.join(config.peers)}"))
    twice = (f"the key {shown(key)} stands twice in one object; vLLM takes the last one" for key in repeated[:MAX_REPEATED])
    for note in (*twice, *notes(config)):
        print(printable(f"note: {note}"))
    return 0


def notes(config: ConnectorConfig) -> Iterator[str]:
    """What an engine takes, and what may be a mistake all the same: names beside those in certificates, and what this host lacks."""
    from bridge.devices import device_names, is_device_name
    from bridge.handoff.identity import common_name
    from bridge.transfer.choose import PACKAGES, installed
    from bridge.vllm.config import shown

    if config.device and not is_device_name(config.device):
        yield f"no device {shown(config.device)} is installed here; the installed ones are {', '.join(device_names())}"
    if not installed(config.agent):
        yield f"the agent {config.agent} needs {' or '.join(PACKAGES[config.agent])}, which is not installed here"
    try:
        with socket.create_server((config.listen, 0), family=socket.AF_INET6 if ":" in config.listen else socket.AF_INET):
            pass
    except (OSError, ValueError):
        yield f"listen is {config.listen}, which is no address of this host"
    mode = stat.S_IMODE(config.identity.private_key.stat().st_mode)
    if mode & 0o007:
        yield f"every user of this host may use private_key, the file {config.identity.private_key} (mode {mode:o}); chmod 600"
    made_for = {f"peer {name!r}": (name, peer.certificate) for name, peer in config.peers.items()}
    for what, (name, certificate) in {"this engine": (config.identity.name, config.identity.certificate), **made_for}.items():
        other = common_name(certificate)
        if other and other != name:
            yield f"the certificate of {what} was made for {other!r}; the names in configurations and tickets should be the same"


def check_fields(given: Mapping[str, Any]) -> None:
    """Raises BadConfiguration for a key of a kv_transfer_config that vLLM does not know, or a value that it does not take."""
    from bridge.vllm.config import Entries, shown

    for key, value in given.items():
        if key not in FIELDS:
            close = get_close_matches(key, FIELDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"vLLM's keys are {', '.join(FIELDS)}"
            if key in Entries.__struct_fields__:
                hint = "it belongs into kv_connector_extra_config"
            raise BadConfiguration(f"vLLM knows no key {shown(key)} beside kv_connector", remedy=hint)
        takes = FIELDS[key]
        try:
            msgspec.convert(value, takes, strict=False)  # vLLM also takes "5" for 5
        except msgspec.ValidationError:
            instead = _INSTEAD.get(takes) or f"choose one of {', '.join(get_args(takes))}"
            raise BadConfiguration(f"{key} is {shown(value)}", remedy=instead) from None


def read(path: Path, repeated: list[str] | None = None) -> dict[str, Any]:
    """The JSON object in a file, read as strictly as vLLM reads it. Raises BadConfiguration, or OSError where it cannot be read.

    repeated: gets the keys that stand twice in one object, of which the last counts here and in vLLM.
    """

    def last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if repeated is not None and len(found) < len(pairs):
            repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if content.startswith(codecs.BOM_UTF8):
        raise BadConfiguration(f"{path} begins with a byte order mark, which vLLM refuses", remedy="save it as UTF-8 without one")
    given = None
    if len(content) <= MAX_BYTES:
        try:
            given = json.loads(content.decode("utf-8"), object_pairs_hook=last)
            json.dumps(given, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError:
            raise BadConfiguration(f"{path} is not UTF-8 text, which vLLM reads", remedy="save it as UTF-8") from None
        except UnicodeEncodeError:
            raise BadConfiguration(
                f"{path} has half of a surrogate pair, which vLLM refuses", remedy="write the character itself"
            ) from None
        except (ValueError, RecursionError) as error:
            raise BadConfiguration(f"{path} is no JSON: {error}", remedy="correct it; docs/vllm.md has two to paste") from None
    if not isinstance(given, dict):
        raise BadConfiguration(f"{path} holds no JSON object of at most 1 MiB", remedy="docs/vllm.md has two to paste")
    return given
