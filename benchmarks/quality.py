"""What each codec does to a real model: perplexity, greedy agreement, and the relative squared error of keys and values.

    python benchmarks/quality.py [--json FILE] [--passages N] [--threads N]

For each passage the first 256 tokens are prefilled, their KV is rounded to bf16, and goes through the reference's encode and decode.
Perplexity: teacher-forced, over the 128 tokens from the 258th on, all of which attend to the cache (the 257th follows from the prefill
alone). Agreement: 32 greedy tokens after the prefill's own first token, beside those from the bf16 cache that no codec touched.
The KV of later tokens stays as the model computes it, fp32. Passages are batched, all of equal length, so nothing is padded.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.codecs import CODECS, declared, reference
from bridge.demo.errors import DemoError
from bridge.demo.model import LanguageModel, LayerKV, Prefilled, load_model
from bridge.demo.paged import through_vectors
from bridge.demo.text import passages
from bridge.wire import Coding, Element

if TYPE_CHECKING:
    import torch

CONTEXT, FOLLOWING, GREEDY, BATCH = 256, 128, 32, 8
DIRECTIONS, DIRECTION_DIM, SEED = 20_000, 128, 20261130
EXPECTED_KEY_ERROR = {3: 0.0338, 4: 0.0093}
TOLERANCE = 0.03


@dataclass(frozen=True)
class Scheme:
    """A row of the table: a codec for all layers, and another one for the first and last `ends` layers."""

    name: str
    codec: str
    end_codec: str = ""
    ends: int = 0

    def codec_of(self, layer: int, layers: int) -> str:
        return self.end_codec if min(layer, layers - 1 - layer) < self.ends else self.codec

    def bytes_against_bf16(self, layers: int, head_dim: int) -> float:
        """Bytes of the slots, over those of bf16."""
        sizes = [declared(self.codec_of(i, layers)).for_layer(head_dim, Element.BF16).slot_bytes(head_dim) for i in range(layers)]
        return sum(sizes) / (layers * 4 * head_dim)


SCHEMES = (
    *(Scheme(name, name) for name in CODECS),
    Scheme("turboquant_4bit_nc, raw in the 2 first and 2 last layers (vLLM's rule)", "turboquant_4bit_nc", "raw", 2),
    Scheme("turboquant_4bit_nc, fp8_e4m3 in the 2 first and 2 last layers", "turboquant_4bit_nc", "fp8_e4m3", 2),
    Scheme("turboquant_3bit_nc, fp8_e4m3 in the 2 first and 2 last layers", "turboquant_3bit_nc", "fp8_e4m3", 2),
)


@dataclass(frozen=True)
class Row:
    """perplexity_change: relative, of the mean over all predicted tokens. agreement: share of equal greedy tokens, by position.
    until_divergence: mean number of equal tokens before the first other one, of 32. key_error, value_error: mean over vectors of
    |x - x'|^2 / |x|^2.
    """

    scheme: str
    bytes_against_bf16: float
    perplexity: float
    perplexity_change: float
    worst_passage_change: float
    agreement: float
    until_divergence: float
    identical_passages: int
    key_error: float
    value_error: float
    worst_layer_key_error: float


STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


class Coded:
    """A batch's KV after encode and decode, kept in bf16 (exact: that is what pages hold), since schemes share codings."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self._layers = layers
        self._kept: dict[tuple[int, int, Coding], tuple[torch.Tensor, np.ndarray]] = {}

    def layers(self, scheme: Scheme) -> tuple[list[LayerKV], np.ndarray]:
        """K and V by layer, fp32 [batch, heads, tokens, dim], and the mean errors of K and V, float64 [layers, 2]."""
        out, errors = [], []
        for index in range(len(self._layers)):
            pair = [self._side(index, side, scheme.codec_of(index, len(self._layers))) for side in (0, 1)]
            out.append((pair[0][0].float(), pair[1][0].float()))
            errors.append([pair[0][1], pair[1][1]])
        return out, np.array(errors)

    def _side(self, index: int, side: int, codec: str) -> tuple[torch.Tensor, np.ndarray]:
        before = self._layers[index][side]
        slots = declared(codec).for_layer(before.shape[-1], Element.BF16)
        key = (index, side, (slots.key, slots.value)[side])
        if key not in self._kept:
            after = through_vectors(before, slots, ("key", "value")[side], Element.BF16)
            self._kept[key] = (after.bfloat16(), relative_error(before.numpy(), after.numpy()).mean())
        return self._kept[key]


def relative_error(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """|x - x'|^2 / |x|^2 of each vector (last axis), float64."""
    x, y = before.astype(np.float64), after.astype(np.float64)
    return ((x - y) ** 2).sum(-1) / np.maximum((x**2).sum(-1), 1e-30)


@dataclass
class Baseline:
    """A batch of passages: what the bf16 cache gives. log_probabilities: [batch, 128]. greedy: [batch, 32]."""

    tokens: torch.Tensor
    coded: Coded
    first: torch.Tensor
    log_probabilities: np.ndarray
    greedy: np.ndarray


def baseline(model: LanguageModel, batch: np.ndarray) -> Baseline:
    import torch

    tokens = torch.from_numpy(batch)
    found: Prefilled = model.prefill_batch(tokens[:, :CONTEXT])
    layers = [(key.bfloat16().float(), value.bfloat16().float()) for key, value in found.layers]
    first = found.logits.argmax(-1)
    logs = model.log_probabilities(layers, tokens[:, CONTEXT : CONTEXT + FOLLOWING + 1]).double().numpy()
    return Baseline(tokens, Coded(layers), first, logs, model.decode_batch(layers, first, GREEDY).numpy())


def measure(model: LanguageModel, batches: Sequence[Baseline], scheme: Scheme) -> Row:
    logs, same, errors = [], [], []
    for b in batches:
        layers, batch_errors = b.coded.layers(scheme)
        errors.append(batch_errors)
        logs.append(model.log_probabilities(layers, b.tokens[:, CONTEXT : CONTEXT + FOLLOWING + 1]).double().numpy())
        same.append(model.decode_batch(layers, b.first, GREEDY).numpy() == b.greedy)
    log, base = np.concatenate(logs), np.concatenate([b.log_probabilities for b in batches])
    equal = np.concatenate(same)
    prefix = np.cumprod(equal, axis=1).sum(axis=1)
    # Batches count by their passages.
    by_layer = np.average(errors, axis=0, weights=[len(b.tokens) for b in batches])
    return Row(
        scheme=scheme.name,
        bytes_against_bf16=scheme.bytes_against_bf16(model.geometry.layers, model.geometry.head_dim),
        perplexity=math.exp(-log.mean()),
        perplexity_change=math.exp(base.mean() - log.mean()) - 1,
        worst_passage_change=float(np.exp(base.mean(axis=1) - log.mean(axis=1)).max()) - 1,
        agreement=float(equal.mean()),
        until_divergence=float(prefix.mean()),
        identical_passages=int((prefix == GREEDY).sum()),
        key_error=float(by_layer[:, 0].mean()),
        value_error=float(by_layer[:, 1].mean()),
        worst_layer_key_error=float(by_layer[:, 0].max()),
    )


@dataclass(frozen=True)
class Directions:
    """Relative squared key error on random directions. holds: whether it is within 3 % of what is expected."""

    bits: int
    error: float
    expected: float
    holds: bool


def random_directions() -> list[Directions]:
    """Relative squared key error on Gaussian directions of 128 elements, fp32, for both code books."""
    x = np.random.default_rng(SEED).standard_normal((DIRECTIONS, DIRECTION_DIM), np.float32)
    rows = []
    for name, bits in (("turboquant_3bit_nc", 3), ("turboquant_4bit_nc", 4)):
        coding = declared(name).for_layer(DIRECTION_DIM, Element.FP32).key
        error = float(relative_error(x, reference.decode(*reference.encode(x, coding), coding, DIRECTION_DIM)).mean())
        expected = EXPECTED_KEY_ERROR[bits]
        rows.append(Directions(bits, error, expected, abs(error / expected - 1) <= TOLERANCE))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| codec | bytes / bf16 | perplexity | change | worst passage | greedy tokens equal | until first other (of 32) "
        "| passages identical | key error | value error | worst layer's key error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.scheme} | {r.bytes_against_bf16:.3f} | {r.perplexity:.3f} | {r.perplexity_change:+.2%} | {r.worst_passage_change:+.2%} "
            f"| {r.agreement:.1%} | {r.until_divergence:.1f} | {r.identical_passages} | {r.key_error:.5f} | {r.value_error:.5f} "
            f"| {r.worst_layer_key_error:.5f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="What each codec does to a real model.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument("--passages", type=int, default=0, metavar="N", help="only the first N passages (default: all)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch; results depend on it in the last bits")
    arguments = parser.parse_args()
    # This folder holds a kernels.py, which transformers would take for the package `kernels`.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    try:
        model = load_model(lambda step, seconds: say(f"{step} ({seconds:.0f} s)"), threads=arguments.threads)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 2
    import torch
    import transformers

    torch.manual_seed(SEED)
    chosen = passages()[: arguments.passages or None]
    tokens = np.array([model.tokenise(passage.text)[: CONTEXT + FOLLOWING + 1] for passage in chosen], dtype=np.int64)
    batches = []
    for start in range(0, len(chosen), BATCH):
        say(f"prefill and unquantised runs of passages {start + 1} to {min(start + BATCH, len(chosen))} of {len(chosen)}")
        batches.append(baseline(model, tokens[start : start + BATCH]))
    rows = []
    for scheme in SCHEMES:
        say(scheme.name)
        rows.append(measure(model, batches, scheme))
        say(f"  perplexity {rows[-1].perplexity_change:+.2%}, greedy tokens equal {rows[-1].agreement:.1%}")
    directions = random_directions()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    print(f"{model.name}, {len(chosen)} passages, {CONTEXT} tokens of context, perplexity over {len(chosen) * FOLLOWING} tokens\n")
    print(table(rows))
    print(f"\nRelative squared key error on {DIRECTIONS} random directions, head dimension {DIRECTION_DIM}:\n")
    for d in directions:
        print(f"- {d.bits} bit: {d.error:.5f} (expected {d.expected}, {'within' if d.holds else 'NOT within'} 3 %)")
    if arguments.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {**versions, "numpy": np.__version__},
            "threads": model.threads,
            "passages": [passage.name for passage in chosen],
            "rows": [asdict(row) for row in rows],
            "directions": [asdict(d) for d in directions],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(d.holds for d in directions) and rows[0].agreement == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
