"""What this back end does not do, said when an engine starts. No engine is imported here."""

from __future__ import annotations

from typing import ClassVar

from backends.cuda.attend import configure
from backends.kernels.attend.arguments import MAX_BATCH
from bridge.errors import KVBridgeError


class UnsupportedAttention(KVBridgeError, ValueError):
    """A layer, or an engine's setting, that this back end cannot serve."""

    clause: ClassVar[str] = "unsupported_attention"
    remedy: ClassVar[str] = "unset KVBRIDGE_ATTENTION to use vLLM's own back end"


def check_layer(
    preset: str, layout: str, head_dim: int, kv_heads: int, query_heads: int, *,
    softcap: float = 0.0, alibi: bool = False, shared: bool = False, attention_type: str = "decoder",
) -> None:  # fmt: skip
    """Raises UnsupportedAttention for a layer that cannot be served, in one sentence."""
    if attention_type != "decoder":
        raise UnsupportedAttention(f"attention of type {attention_type!r}: only decoder layers are served")
    if alibi:
        raise UnsupportedAttention("ALiBi slopes are not applied by the decode kernel")
    if shared:
        raise UnsupportedAttention("a layer that reads another layer's KV is not served")
    if softcap < 0:
        raise UnsupportedAttention(f"a soft cap of {softcap} is negative")
    if kv_heads < 1 or query_heads % kv_heads:
        raise UnsupportedAttention(f"{query_heads} query heads are no multiple of {kv_heads} kv heads")
    try:
        configure(preset, layout, head_dim, kv_heads, query_heads // kv_heads, softcap=softcap > 0)
    except ValueError as error:
        raise UnsupportedAttention(str(error)) from None


def check_engine(*, speculative: bool = False, ubatching: bool = False, sequences: int = 1) -> None:
    """Raises UnsupportedAttention for a setting of the engine that cannot be served."""
    if speculative:
        raise UnsupportedAttention(
            "speculative decoding asks for several tokens of a sequence at once, which the decode kernel does not do"
        )
    if sequences > MAX_BATCH:
        raise UnsupportedAttention(f"{sequences} sequences at once", remedy=f"set max_num_seqs to {MAX_BATCH} or less")
    if ubatching:
        raise UnsupportedAttention("two micro-batches at once would share one workspace; turn dual batch overlap off")
