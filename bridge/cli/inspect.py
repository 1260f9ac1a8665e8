"""Print what a .kvb file holds: manifest, sizes, tags, verdict.

Exit code 0 if every block's tag is right, 1 if the file is damaged or no .kvb file, 2 if it cannot be read or memory does not hold it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from bridge.codecs import codec_name, dialects
from bridge.errors import printable
from bridge.wire import Manifest, PayloadMap
from bridge.wire.container import open_container, read_manifest, verify_contents
from bridge.wire.errors import TooLarge, WireError


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE.kvb")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    with open_container(options.file) as file:
        report = {"file": str(options.file), **examine(file)}
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        print(as_text(report))
    return 0 if report["verdict"] == "ok" else 1


def examine(file: io.BufferedReader) -> dict[str, Any]:
    """What an open file holds, and the verdict on it. Raises TooLarge where memory does not hold one run of it, which damages nothing."""
    try:
        manifest, key = read_manifest(file, os.fstat(file.fileno()).st_size)
    except WireError as error:
        # Other writers have their magic in the first eight bytes.
        file.seek(0)
        foreign = dialects.by_magic(file.read(8))
        if foreign is not None:
            return {"verdict": dialects.ForeignDialect.clause, "detail": foreign.sentence, "writer": foreign.name}
        return {"verdict": error.clause, "detail": error.detail}
    report = describe(manifest)
    try:
        verify_contents(manifest, key, file)
    except TooLarge:
        raise
    except WireError as error:
        return report | {"verdict": error.clause, "detail": error.detail}
    return report | {"verdict": "ok"}


def describe(manifest: Manifest) -> dict[str, Any]:
    """A manifest as plain values."""
    payload = PayloadMap(manifest)
    return {
        "version": f"0.{manifest.minor}",
        "model": manifest.model_digest.hex(),
        "content": {kind.name.lower(): digest.hex() for kind, digest in manifest.content},
        "request": manifest.request_id,
        "lease": f"{manifest.lease:016x}",
        "generation": manifest.generation,
        "shard": f"TP {manifest.shard.tp_rank} of {manifest.shard.tp_size}, PP {manifest.shard.pp_rank} of {manifest.shard.pp_size}",
        "groups": [
            {
                "kind": group.kind.name.lower(),
                "tokens": [group.first_token, group.end_token],
                "heads": group.heads,
                "head_range": [group.head_first, group.head_first + group.head_count],
                "head_dim": group.head_dim,
                "window": group.window,
            }
            for group in manifest.groups
        ],
        "layers": [
            {
                "index": layer.index,
                "group": layer.group,
                "codec": codec_name(manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim),
                "slot_bytes": manifest.codecs[layer.codec].slot_bytes(manifest.groups[layer.group].head_dim),
                "scales": [layer.key_scale, layer.value_scale],
            }
            for layer in manifest.layers
        ],
        "chunk_tokens": manifest.chunk_tokens,
        "chunks": payload.chunk_count,
        "blocks": payload.blocks,
        "payload_bytes": payload.payload_bytes,
    }


def as_text(report: dict[str, Any]) -> str:
    """The report for people: what the file's writer chose, such as the request id, cannot look like another line of it."""
    lines = [f"{report['file']}: {report['verdict']}" + (f" ({report['detail']})" if "detail" in report else "")]
    if "request" in report:
        lines += [
            f"  format      {report['version']}, {report['payload_bytes']:,} payload bytes, chunks: {report['chunks']:,}, "
            f"blocks with a tag each: {report['blocks']:,}",
            f"  request     {report['request']}, lease {report['lease']}, generation {report['generation']}, {report['shard']}",
            f"  model       {report['model']}",
        ]
        lines += [f"  {kind:<11} {digest}" for kind, digest in report["content"].items()]
        for number, group in enumerate(report["groups"]):
            lines.append(
                f"  group {number}     {group['kind']}, tokens {group['tokens'][0]} to {group['tokens'][1] - 1}, kv heads "
                f"{group['head_range'][0]} to {group['head_range'][1] - 1} of {group['heads']}, head dimension {group['head_dim']}"
            )
        for codec, first, last, slot in _runs(report["layers"]):
            names = f"layer {first}" if first == last else f"layers {first} to {last}"
            lines.append(f"  {names}: {codec}, {slot} bytes a token and kv head")
    return "\n".join(map(printable, lines))


def _runs(layers: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Neighbouring layers of the same codec, as (codec, first, last, slot bytes)."""
    runs: list[tuple[str, int, int, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer["codec"] and runs[-1][2] == layer["index"] - 1:
            runs[-1] = (runs[-1][0], runs[-1][1], layer["index"], runs[-1][3])
        else:
            runs.append((layer["codec"], layer["index"], layer["index"], layer["slot_bytes"]))
    return runs
