"""What a slot's bytes mean: the declared codecs, their tables, and the reference encoder and decoder."""

from bridge.codecs.declared import CODECS, DeclaredCodec, check_tables, codec_name, declared
from bridge.codecs.dialects import ForeignDialect
from bridge.codecs.errors import NotCarried, UnknownCodec

__all__ = ["CODECS", "DeclaredCodec", "ForeignDialect", "NotCarried", "UnknownCodec", "check_tables", "codec_name", "declared"]
