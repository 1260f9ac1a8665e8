"""Hand a real model's KV cache to a second process and decode there.

SmolLM2-135M prefills the prompt in this process. Its KV cache crosses to a second process, once for each codec, and the second process
decodes greedily from what it received. Exit code 0 only if every codec's tokens equal those of decoding locally from a cache that
went through the reference encoder and decoder; for raw, those of decoding without any hand-off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bridge.codecs import CODECS, declared
from bridge.demo.errors import BadPrompt
from bridge.transfer.choose import KINDS

REPEAT_SECONDS = 5.0


def positive(text: str) -> int:
    """An argument that is a whole number from 1 to 4096."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number between 1 and 4096")
    return int(text)


def port_number(text: str) -> int:
    """An argument that is a TCP port, or 0."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port between 0 and 65535")
    return int(text)


def read_prompt(path: Path) -> str:
    """The text of a prompt file. Raises BadPrompt, or OSError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadPrompt(f"{path} is not UTF-8 text", remedy="convert it, or give another file") from None


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--codec", action="append", metavar="NAME", help=f"one codec; may be repeated (default: all: {', '.join(CODECS)})")
    command.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 text file to prefill (default: a passage of its own)")
    command.add_argument("--tokens", type=positive, default=32, help="tokens to decode (default: 32)")
    command.add_argument("--prefiller-block-size", type=positive, default=16, metavar="N", help="tokens of a page here (default: 16)")
    command.add_argument("--decoder-block-size", type=positive, default=64, metavar="N", help="tokens of a page there (default: 64)")
    command.add_argument(
        "--mode", choices=("park", "stream"), default="park", help="pack everything first, or chunk by chunk (default: park)"
    )
    command.add_argument("--port", type=port_number, default=0, help="control port of the prefiller (default: any free one)")
    command.add_argument("--keep", type=Path, metavar="FOLDER", help="also pack each payload into FOLDER/CODEC.kvb (replaced if it exists)")
    command.add_argument("--agent", choices=KINDS, default="nixl", help="what carries the bytes; stream is TLS (default: nixl)")
    command.add_argument("--device", default="cpu", metavar="NAME", help="what packs and lands: cpu, or cpu-reference (default: cpu)")
    command.add_argument("--prefiller", metavar="NAME", help="what packs, where it is another device than --device, such as xpu-emulated")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    codecs = [declared(name) for name in options.codec] if options.codec else list(CODECS.values())
    from bridge.demo import handoff, report

    start = time.monotonic()
    said: dict[str, float] = {}

    def progress(what: str) -> None:
        """One line a step; the same step again only now and then, as a sign of life."""
        now = time.monotonic() - start
        if now - said.get(what, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            print(f"[{now:6.1f} s] {what}", file=sys.stderr, flush=True)
            said[what] = now

    settings = handoff.Settings(
        codecs=[codec.name for codec in codecs],
        prompt=read_prompt(options.prompt_file) if options.prompt_file else None,
        count=options.tokens,
        block_sizes=(options.prefiller_block_size, options.decoder_block_size),
        mode=options.mode,
        port=options.port,
        keep=options.keep,
        device=options.prefiller or options.device,
        decoder_device=options.device,
        agent=options.agent,
    )
    result = handoff.demonstrate(settings, progress)
    if options.json:
        json.dump(report.as_json(result), sys.stdout, indent=1)
        print()
    else:
        print(report.as_text(result))
    return 0 if result.passed else 1
