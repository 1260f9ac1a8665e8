"""The codecs by name. Each is one declared object; nothing anywhere matches on parts of a name.

`declared(name).for_layer(head_dim, source)` gives the SlotCodec that stands in a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from bridge.codecs import dialects, tables
from bridge.codecs.errors import NotCarried, UnknownCodec
from bridge.wire.coding import Coding, CodingKind, Element, Rotation, SlotCodec
from bridge.wire.errors import BadHeadDim


@dataclass(frozen=True)
class SideRule:
    """How one side's Coding follows from a layer's head dimension and source type. bits 0: those of the source."""

    kind: CodingKind
    bits: int = 0

    def coding(self, head_dim: int, source: Element) -> Coding:
        if self.kind is CodingKind.RAW and source is not Element.E4M3FN:
            return Coding(CodingKind.RAW, source.bits, source)
        if self.kind in (CodingKind.RAW, CodingKind.FP8):
            return Coding(CodingKind.FP8, 8, Element.E4M3FN)
        if self.kind in (CodingKind.AFFINE, CodingKind.INT8):
            return Coding(self.kind, self.bits)
        return Coding(CodingKind.CODEBOOK, self.bits, rotation=Rotation.SYLVESTER_HADAMARD, digest=tables.digest(head_dim, self.bits))


@dataclass(frozen=True)
class DeclaredCodec:
    """A codec that users name. vllm: the name of vLLM's cache dtype with the same slots, if there is one."""

    name: str
    key: SideRule
    value: SideRule
    vllm: str = ""

    @property
    def lossless(self) -> bool:
        """Whether K and V come back bit for bit."""
        return self.key.kind is CodingKind.RAW and self.value.kind is CodingKind.RAW

    def for_layer(self, head_dim: int, source: Element) -> SlotCodec:
        """The SlotCodec for vectors of `head_dim` elements of type `source`: BF16, FP16, FP32 or E4M3FN. Raises NotCarried.

        raw is the source's own type; for pages of fp8, that is fp8 with the engine's scales.
        """
        if source is Element.NONE:
            raise NotCarried(f"codec {self.name} takes bf16, fp16, fp32 or fp8 pages")
        if head_dim % 16:
            raise NotCarried(f"head dimension {head_dim} is no multiple of 16", remedy="no codec carries this model")
        if CodingKind.CODEBOOK in (self.key.kind, self.value.kind) and head_dim not in tables.head_dims():
            powers = ", ".join(map(str, tables.head_dims()))
            raise NotCarried(f"codec {self.name} rotates keys, which needs a head dimension of {powers}; this model has {head_dim}")
        codec = SlotCodec(self.key.coding(head_dim, source), self.value.coding(head_dim, source))
        codec.check_head_dim(head_dim)
        return codec


_RAW, _FP8 = SideRule(CodingKind.RAW), SideRule(CodingKind.FP8)
_ROTATED_3, _ROTATED_4 = SideRule(CodingKind.CODEBOOK, 3), SideRule(CodingKind.CODEBOOK, 4)
_AFFINE_3, _AFFINE_4 = SideRule(CodingKind.AFFINE, 3), SideRule(CodingKind.AFFINE, 4)
_INT8 = SideRule(CodingKind.INT8, 8)

RAW = DeclaredCodec("raw", _RAW, _RAW)
FP8_E4M3 = DeclaredCodec("fp8_e4m3", _FP8, _FP8)
INT8_PER_TOKEN_HEAD = DeclaredCodec("int8_per_token_head", _INT8, _INT8)
TURBOQUANT_K8V4 = DeclaredCodec("turboquant_k8v4", _FP8, _AFFINE_4, vllm="turboquant_k8v4")
TURBOQUANT_4BIT_NC = DeclaredCodec("turboquant_4bit_nc", _ROTATED_4, _AFFINE_4, vllm="turboquant_4bit_nc")
TURBOQUANT_K3V4_NC = DeclaredCodec("turboquant_k3v4_nc", _ROTATED_3, _AFFINE_4, vllm="turboquant_k3v4_nc")
TURBOQUANT_3BIT_NC = DeclaredCodec("turboquant_3bit_nc", _ROTATED_3, _AFFINE_3, vllm="turboquant_3bit_nc")

CODECS: dict[str, DeclaredCodec] = {
    codec.name: codec
    for codec in (RAW, FP8_E4M3, INT8_PER_TOKEN_HEAD, TURBOQUANT_K8V4, TURBOQUANT_4BIT_NC, TURBOQUANT_K3V4_NC, TURBOQUANT_3BIT_NC)
}
"""Every declared codec by name, from most to fewest bits."""


def declared(name: str) -> DeclaredCodec:
    """The codec of this name. Raises UnknownCodec, with a suggestion; ForeignDialect where another writer's bytes have that name."""
    if name in CODECS:
        return CODECS[name]
    foreign = dialects.by_name(name)
    if foreign is not None:
        raise foreign.refusal()
    close = get_close_matches(name, CODECS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the codecs are {', '.join(CODECS)}"
    raise UnknownCodec(f"there is no codec named {name!r}", remedy=hint)


def side_name(coding: Coding) -> str:
    """One side of a codec in words, such as "codebook 4 bit"."""
    name = coding.kind.name.lower()
    if coding.row_bytes:
        return f"{name} {coding.row_bytes} bytes"
    if coding.element is not Element.NONE:
        return f"{name} {coding.element.name.lower()}"
    return f"{name} {coding.bits} bit" if coding.bits else name


def codec_name(codec: SlotCodec, head_dim: int) -> str:
    """The declared name of a codec, or its two sides in words."""
    for codec_of in CODECS.values():
        for source in (Element.BF16, Element.FP16, Element.FP32):
            try:
                if codec_of.for_layer(head_dim, source) == codec:
                    return codec_of.name
            except (NotCarried, BadHeadDim):
                continue
    return f"K {side_name(codec.key)}, V {side_name(codec.value)}"


def check_tables(codec: SlotCodec, head_dim: int) -> None:
    """Raises BadCodebook unless the code books that a received codec names are the ones held here."""
    from bridge.wire.errors import BadCodebook

    for side in (codec.key, codec.value):
        if side.kind is CodingKind.CODEBOOK:
            held = tables.digest(head_dim, side.bits) if head_dim in tables.head_dims() else None
            if held != side.digest:
                raise BadCodebook(f"the {side.bits} bit code book for head dimension {head_dim} is not the one held here")
