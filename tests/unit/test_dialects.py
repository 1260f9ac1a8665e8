"""Bytes of other writers are named and refused; those with an exact rule are converted."""

import json

import numpy as np
import pytest

from bridge.cli.main import main
from bridge.codecs import ForeignDialect, NotCarried, UnknownCodec, declared, dialects
from bridge.codecs.fp8 import decode_e4m3


def test_every_writer_has_one_sentence_and_names_of_its_own():
    names = [name for dialect in dialects.DIALECTS for name in dialect.names]
    assert len(set(names)) == len(names)
    for dialect in dialects.DIALECTS:
        assert dialect.name in dialect.names or dialect.magic
        assert ". " not in dialect.sentence
        assert not dialect.sentence.endswith(".")


@pytest.mark.parametrize("name", [name for dialect in dialects.DIALECTS for name in dialect.names] + ["TKV", "TQ01"])
def test_a_codec_of_their_name_is_refused_with_what_it_is(name):
    with pytest.raises(ForeignDialect) as caught:
        declared(name)
    assert caught.value.detail == dialects.by_name(name).sentence
    assert caught.value.advice


def test_other_unknown_names_are_unknown():
    with pytest.raises(UnknownCodec) as caught:
        declared("turboquant_4bit")
    assert type(caught.value) is UnknownCodec
    assert dialects.by_name("raw") is None


@pytest.mark.parametrize(("magic", "name"), [(b"TQ01", "lmcache-turbo-quant-serde"), (b"KVB1", "kvblockd")])
@pytest.mark.parametrize("size", [4, 8, 64, 500])
def test_inspect_says_whose_file_it_is(tmp_path, capsys, magic, name, size):
    path = tmp_path / "file.kvb"
    path.write_bytes((magic + b"\1\4" + bytes(size))[:size])
    assert main(["inspect", str(path)]) == 1
    text = capsys.readouterr().out
    assert "foreign_dialect" in text
    assert dialects.by_name(name).sentence in text
    assert main(["inspect", "--json", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["writer"]) == ("foreign_dialect", name)


@pytest.mark.parametrize("data", [b"", b"TQ0", b"TQ02" + bytes(80), b"KVBFILE\n" + bytes(80), b"\0TQ01" + bytes(80)])
def test_inspect_keeps_its_own_clauses_for_everything_else(tmp_path, capsys, data):
    path = tmp_path / "file.kvb"
    path.write_bytes(data)
    assert main(["inspect", "--json", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] != "foreign_dialect"
    assert "writer" not in report


def test_signed_rotations_are_refused():
    dialects.check_rotation(None)
    with pytest.raises(ForeignDialect, match="LMCache"):
        dialects.check_rotation([42, 1379, 2716])
    with pytest.raises(ForeignDialect, match="unknown seeds"):
        dialects.check_rotation([42, 42, 42])
    assert dialects.by_seeds([]) is None


def e4b15(code):
    """By hand: sign, four exponent bits of bias 15, three of mantissa, no NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = mantissa * 2.0**-17 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 18)
    return -value if code & 0x80 else value


def test_e4b15_is_the_same_bytes_at_another_scale():
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    same, scale = dialects.e4b15_as_e4m3(codes)
    assert same.tobytes() == codes.tobytes()
    expected = np.array([e4b15(int(code)) for code in codes], np.float32)
    assert np.array_equal(decode_e4m3(same) * np.float32(scale), expected)
    assert np.array_equal(np.signbit(decode_e4m3(same)), np.signbit(expected))
    assert dialects.e4m3_as_e4b15(same, scale).tobytes() == codes.tobytes()
    assert e4b15(0x7F) == 1.875
    assert e4b15(1) == 2.0**-17


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_what_has_no_counterpart_is_refused(code):
    codes = np.array([0, 1, code, code], np.uint8)
    with pytest.raises(NotCarried, match="2 E4B15 codes"):
        dialects.e4b15_as_e4m3(codes)
    with pytest.raises(NotCarried, match="NaN"):
        dialects.e4m3_as_e4b15(codes, dialects.E4B15_SCALE)
    with pytest.raises(NotCarried, match=r"scale 1\.0"):
        dialects.e4m3_as_e4b15(codes[:2], 1.0)


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), (None, False)])
def test_which_devices_write_e4b15(capability, expected):
    assert dialects.writes_e4b15(capability) is expected
