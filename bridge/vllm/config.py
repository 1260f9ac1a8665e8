"""The connector's configuration: kv_connector_extra_config as one typed object. Unknown keys are refused with a suggestion."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from bridge.codecs import declared
from bridge.codecs.errors import UnknownCodec
from bridge.handoff import Bounds, Identity, PeerConfig
from bridge.handoff.errors import BadBounds, BadIdentity
from bridge.handoff.identity import PinnedPeers, certificate_der, server_context
from bridge.handoff.staging import Where
from bridge.transfer import names
from bridge.transfer.choose import KINDS
from bridge.vllm.errors import BadConfiguration

Comparison = Literal["sampled", "whole"]

MAX_NAME_BYTES = names.MAX_NAME_BYTES - len("-4095")
"""An agent's name is the engine's, with its rank."""

_SHOWN = 80

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def shown(value: object) -> str:
    """A value that may be anything, in a sentence."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_text(value: str) -> bool:
    return value.encode("utf-8", "replace").decode() == value


def _is_host(value: str) -> bool:
    """Whether it can be an address or a host's name, alone: without blanks, brackets, port or scheme."""
    if not value or len(value) > 253:
        return False
    try:
        if ":" in value:
            address, percent, zone = value.partition("%")
            IPv6Address(address)
            return not percent or bool(_PLAIN.fullmatch(zone))
        name = value.encode("idna").decode("ascii")
        if name.replace(".", "").isdigit():
            socket.inet_aton(name)  # also takes 127.1, as resolvers do
        return bool(_PLAIN.fullmatch(name))
    except (ValueError, OSError):
        return False


def _bounds(given: Mapping[str, float]) -> Bounds:
    known = Bounds.__dataclass_fields__
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the bounds are {', '.join(known)}"
            raise BadConfiguration(f"bounds has the unknown key {shown(name)}", remedy=hint)
    try:
        return Bounds(**given)
    except BadBounds as error:
        raise BadConfiguration(f"bounds: {error.detail}", remedy=error.advice) from None


class PeerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer. host and port are needed for prefillers that this engine fetches from; rank r listens on port + r."""

    certificate: str
    host: str = ""
    port: int = 0


class Entries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kv_connector_extra_config.

    name, certificate, private_key: this host's identity (`kvbridge identity NAME`). peers: by the name in their certificate's file.
    listen, port: the control channel of a prefiller's rank 0. codec: how KV travels unless the request asks otherwise; codec_by_layer:
    exceptions, by layer number. request_codec: whether requests may choose. staging_bytes: budget of memory for payloads, a rank.
    staging: where they are, "auto", "host" or "device". chunk_tokens: what is packed, sent and landed at a time. lossy_prefix_cache: the
    operator's consent that what a lossy codec left may enter the decoder's prefix cache, where other requests find it. agent: what carries
    the bytes: nixl, ucx, or stream (TLS, for links that are not trusted); the same on both ends. transports: UCX transports, for nixl and
    ucx. data_port: of a prefiller's rank 0 with stream (rank r: data_port + r; 0: any free one). minimum_gbps: gigabytes a second that each
    peer's link must reach, or a warning is logged; refuse_slow_links: such links are refused. compare_weights: whether the digest of the
    weights, and of LoRA adapters, is of samples or of the whole. bounds: seconds, by the names of docs/handoff.md.
    """

    name: str
    certificate: str
    private_key: str
    peers: dict[str, PeerEntry]
    listen: str = "127.0.0.1"
    port: int = 0
    codec: str = "raw"
    codec_by_layer: dict[int, str] = {}
    request_codec: bool = True
    staging_bytes: int = 256 << 20
    staging: str = "auto"
    chunk_tokens: int = 512
    device: str = ""
    lossy_prefix_cache: bool = False
    agent: str = "nixl"
    transports: list[str] | None = None
    data_port: int = 0
    minimum_gbps: float = 0.0
    refuse_slow_links: bool = False
    compare_weights: Comparison = "sampled"
    bounds: dict[str, float] = {}


@dataclass(frozen=True)
class ConnectorConfig:
    """A checked configuration; see Entries for the fields."""

    identity: Identity
    peers: Mapping[str, PeerConfig]
    listen: str
    port: int
    codec: str
    codec_by_layer: Mapping[int, str]
    request_codec: bool
    staging_bytes: int
    staging: Where
    chunk_tokens: int
    device: str
    lossy_prefix_cache: bool
    agent: str
    transports: list[str] | None
    data_port: int
    minimum_gbps: float
    refuse_slow_links: bool
    compare_weights: Comparison
    bounds: Bounds = field(default_factory=Bounds)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """From kv_connector_extra_config. Raises BadConfiguration."""
        known = Entries.__struct_fields__
        if not isinstance(extra, Mapping):
            raise BadConfiguration("kv_connector_extra_config is no object of keys and values")
        for key in extra:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(known)}"
                raise BadConfiguration(f"kv_connector_extra_config has the unknown key {shown(key)}", remedy=hint)
        try:
            entries = msgspec.convert(dict(extra), Entries, strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            what, at, where = str(error).partition(" - at ")
            raise BadConfiguration(f"kv_connector_extra_config: {_cut(what)}{at}{_cut(where)}") from None
        bounds = _bounds(entries.bounds)
        for what, value, low, high in (
            ("port", entries.port, 0, 65535),
            ("data_port", entries.data_port, 0, 65535),
            *((f"the port of {shown(name)}", peer.port, 0, 65535) for name, peer in entries.peers.items()),
            *(("a layer of codec_by_layer", layer, 0, 65535) for layer in entries.codec_by_layer),
            ("minimum_gbps", entries.minimum_gbps, 0, 10_000),
            ("staging_bytes", entries.staging_bytes, 1 << 20, 1 << 44),
            ("chunk_tokens", entries.chunk_tokens, 16, 1 << 16),
        ):
            if not low <= value <= high:
                raise BadConfiguration(f"{what} is {shown(value)}, outside {low} to {high}")
        if not entries.name or not _is_text(entries.name) or len(entries.name.encode()) > MAX_NAME_BYTES:
            what = "empty" if not entries.name else "no name: too long, or no Unicode text"
            raise BadConfiguration(f"name is {what}", remedy="give the name of this engine's certificate")
        for name in entries.peers:
            if not name or not _is_text(name) or len(name.encode()) > MAX_NAME_BYTES:
                raise BadConfiguration(f"peers has the name {shown(name)}", remedy="give the name of that engine's certificate")
        hosts = {f"the host of peer {name!r}": peer.host for name, peer in entries.peers.items() if peer.host}
        for what, host in {"listen": entries.listen, **hosts}.items():
            if not _is_host(host):
                raise BadConfiguration(
                    f"{what} is {shown(host)}, no address and no host's name",
                    remedy="write either alone, such as 10.0.0.1, fd00::1 or decode-0.example, with no blanks, brackets, port or scheme"
                    + ("; 0.0.0.0 is all of IPv4" if what == "listen" else ""),
                )
        if entries.data_port and entries.data_port == entries.port:
            raise BadConfiguration(
                f"port and data_port are both {entries.port}", remedy="give each a port of its own, and one more for each TP rank"
            )
        if entries.chunk_tokens % 16:
            raise BadConfiguration(f"chunk_tokens is {entries.chunk_tokens}, no multiple of 16")
        if entries.staging not in get_args(Where):
            raise BadConfiguration(f"staging is {shown(entries.staging)}", remedy=f"choose one of {', '.join(get_args(Where))}")
        if entries.agent not in KINDS:
            raise BadConfiguration(f"there is no transfer agent {shown(entries.agent)}", remedy=f"choose one of {', '.join(KINDS)}")
        if not entries.peers:
            raise BadConfiguration("peers is empty, so nobody can be met", remedy="name the other engines with their certificates")
        if entries.data_port and entries.agent != "stream":
            raise BadConfiguration(
                f"data_port is the stream agent's, and the agent is {entries.agent}", remedy="leave it out, or set agent to stream"
            )
        if entries.transports is not None and entries.agent == "stream":
            raise BadConfiguration("transports are UCX's, and the agent stream has none", remedy="leave transports out")
        for codec in (entries.codec, *entries.codec_by_layer.values()):
            try:
                declared(codec[:_SHOWN])
            except UnknownCodec as error:
                raise BadConfiguration(error.detail, remedy=error.advice) from None
        files = []
        for what, file in (("certificate", entries.certificate), ("private_key", entries.private_key)):
            command = f"kvbridge identity {shown(entries.name)} --out {shown(os.path.dirname(file) or '.')}"
            files.append((what, file, f"make it here with `{command}`, which makes both, or correct its path"))
        for name, entry in entries.peers.items():
            copied = f"copy the .crt file here that `kvbridge identity {shown(name)}` made on that engine's host"
            files.append((f"the certificate of peer {shown(name)}", entry.certificate, copied))
        for what, file, remedy in files:
            try:
                there = Path(file).is_file()
            except (OSError, ValueError) as error:  # a folder of another user, a name that is too long or none
                reason = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
                raise BadConfiguration(f"{what}, the file {shown(file)}, cannot be looked at: {reason}") from None
            if not there:
                raise BadConfiguration(f"{what}: there is no file {shown(file)}", remedy=remedy)
        identity = Identity(entries.name, Path(entries.certificate), Path(entries.private_key))
        peers = {name: PeerConfig(Path(p.certificate), p.host, p.port) for name, p in entries.peers.items()}
        if entries.name in peers:
            raise BadConfiguration(f"peers names {entries.name!r}, which is this engine itself", remedy="name the other engines there")
        try:
            own = certificate_der(identity.certificate)
            for name, peer in peers.items():
                if certificate_der(peer.certificate) == own:
                    raise BadConfiguration(
                        f"the peer {name!r} has this engine's own certificate",
                        remedy="copy that peer's .crt file here, or correct `certificate`, which is this engine's own",
                    )
            PinnedPeers(peers)
            server_context(identity, peers)
        except BadIdentity as error:
            raise BadConfiguration(error.detail, remedy=error.advice) from None
        return cls(
            identity=identity,
            peers=peers,
            listen=entries.listen,
            port=entries.port,
            codec=entries.codec,
            codec_by_layer=entries.codec_by_layer,
            request_codec=entries.request_codec,
            staging_bytes=entries.staging_bytes,
            staging=cast("Where", entries.staging),
            chunk_tokens=entries.chunk_tokens,
            device=entries.device,
            lossy_prefix_cache=entries.lossy_prefix_cache,
            agent=entries.agent,
            transports=entries.transports,
            data_port=entries.data_port,
            minimum_gbps=entries.minimum_gbps,
            refuse_slow_links=entries.refuse_slow_links,
            compare_weights=entries.compare_weights,
            bounds=bounds,
        )

    def check_role(self, produces: bool, consumes: bool) -> None:
        """Raises BadConfiguration for what an engine of this role lacks, or where it could hand on what a lossy codec left as its own.

        That would enter the prefix cache, be found there by a later prefill, and leave under a manifest that does not say so.
        """
        if produces and not self.port:
            raise BadConfiguration("port is missing", remedy="give the prefiller's control channel a port, and tell it to the decoders")
        for name, peer in self.peers.items():
            if not produces and not (peer.host and peer.port):
                raise BadConfiguration(f"peer {name!r} has no host and port", remedy="give the address of its control channel")
        if self.lossy_prefix_cache and produces and consumes:
            raise BadConfiguration(
                "lossy_prefix_cache is set for an engine that also hands off (kv_role kv_both), which would pass lossy KV on as its own",
                remedy="leave lossy_prefix_cache out, or use kv_consumer",
            )
