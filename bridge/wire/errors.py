"""One error type for each clause of docs/wire-format.md. A failing test names the clause that it broke."""

from __future__ import annotations

from bridge.errors import KVBridgeError


class WireError(KVBridgeError):
    """Bytes that are not a valid manifest, payload or container."""

    clause = "wire"
    remedy = "nothing of it was used; ask the sender for it again, and compare both sides' versions if it repeats"


class BadMagic(WireError):
    """W01: the first eight bytes are not those of this format."""

    clause = "bad_magic"


class UnsupportedVersion(WireError):
    """W02: the major version is not ours (a higher minor is accepted)."""

    clause = "unsupported_version"
    remedy = "upgrade the older of the two sides"


class Truncated(WireError):
    """W03: fewer bytes than the format says."""

    clause = "truncated"


class TrailingBytes(WireError):
    """W04: more bytes than the format says."""

    clause = "trailing_bytes"


class TooLarge(WireError):
    """W05: a size over its limit, refused before anything is allocated."""

    clause = "too_large"


class ReservedNotZero(WireError):
    """W06: reserved or padding bytes that are not zero."""

    clause = "reserved_not_zero"


class SectionOrder(WireError):
    """W07: sections that repeat or do not ascend."""

    clause = "section_order"


class UnknownSection(WireError):
    """W08: a section that this reader does not know and may not skip."""

    clause = "unknown_section"
    remedy = "upgrade the older of the two sides"


class MissingSection(WireError):
    """W09: a required section is absent."""

    clause = "missing_section"


class SectionSize(WireError):
    """W10: a section's length does not fit its contents."""

    clause = "section_size"


class BadSeal(WireError):
    """W11: the seal does not match the manifest under the payload's key."""

    clause = "bad_seal"


class BadText(WireError):
    """W12: a request id that is empty, too long or not UTF-8."""

    clause = "bad_text"


class BadContent(WireError):
    """W13: content digests that repeat, do not ascend, are of unknown kind, or lack the tokens' digest."""

    clause = "bad_content"


class BadShard(WireError):
    """W14: a rank that is not below its world size, or a head range outside the group."""

    clause = "bad_shard"


class BadChunking(WireError):
    """W15: a chunk size that is zero, over its limit or no multiple of 16."""

    clause = "bad_chunking"


class BadGroup(WireError):
    """W16: a KV group of unknown kind, or with impossible dimensions for its kind."""

    clause = "bad_group"


class BadTokenRange(WireError):
    """W17: an empty or backward token range, or one over the limit."""

    clause = "bad_token_range"


class BadCoding(WireError):
    """W18: a coding of unknown kind, whose parameters contradict each other, or a codec without a key side."""

    clause = "bad_coding"


class BadCodebook(WireError):
    """W19: a code book digest that is not the one this reader holds for these bits and head dimension."""

    clause = "bad_codebook"
    remedy = "the sender quantises with other tables; both sides must use the same ones"


class BadHeadDim(WireError):
    """W20: a head dimension that the layer's codec cannot carry."""

    clause = "bad_head_dim"
    remedy = "choose fp8_e4m3 or raw for this model, which take any head dimension that is a multiple of 16"


class BadReference(WireError):
    """W21: a layer that names a group or codec that does not exist, or a group or codec that no layer names."""

    clause = "bad_reference"


class LayerOrder(WireError):
    """W22: layer indices that repeat or do not ascend."""

    clause = "layer_order"


class BadScale(WireError):
    """W23: a scale that is not a positive finite number, or not 1 where the codec has no scale."""

    clause = "bad_scale"


class PayloadSize(WireError):
    """W24: the stated payload size is not the one that the manifest's fields give."""

    clause = "payload_size"


class BadTag(WireError):
    """W25: a block whose tag does not match its bytes, valid range and place."""

    clause = "bad_tag"
    remedy = "the block was damaged, stale or another request's; it was not committed: fetch again, or recompute"


class DirtyPadding(WireError):
    """W26: bytes of invalid rows, or of a tag plane's padding, that are not zero."""

    clause = "dirty_padding"
