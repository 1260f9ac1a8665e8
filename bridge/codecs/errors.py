"""What can go wrong with codecs."""

from __future__ import annotations

from bridge.errors import KVBridgeError


class UnknownCodec(KVBridgeError):
    """No codec of that name is declared."""

    clause = "unknown_codec"


class NotCarried(KVBridgeError):
    """The codec cannot carry this layer: its head dimension or its source type."""

    clause = "codec_does_not_fit"
    remedy = "choose fp8_e4m3 or raw for this model"
