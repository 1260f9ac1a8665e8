"""Layers that are alike are checked once; nothing that is not quite alike slips through with them."""

from dataclasses import replace

import pytest

from bridge.codecs import declared
from bridge.wire import ContentKind, Element, Group, Layer, Manifest, new_key, open_sealed, seal, token_digest
from bridge.wire.errors import BadReference, BadScale, LayerOrder


def manifest(*layers: Layer, codec: str = "raw") -> Manifest:
    return Manifest(
        model_digest=bytes(32),
        content=((ContentKind.TOKENS, token_digest([1])),),
        request_id="r",
        lease=1,
        generation=0,
        chunk_tokens=16,
        groups=(Group(2, 64, 0, 16),),
        codecs=(declared(codec).for_layer(64, Element.BF16),),
        layers=layers,
    )


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (Layer(1, 1, 0), BadReference),
        (Layer(1, 0, 1), BadReference),
        (Layer(1, 1.0, 0), BadReference),
        (Layer(1, [], 0), BadReference),
        (Layer(1, 0, {}), BadReference),
        (Layer(1, 0, 0, 2.0), BadScale),
        (Layer(1, 0, 0, 1.0, float("nan")), BadScale),
        (Layer(0, 0, 0), LayerOrder),
    ],
    ids=repr,
)
def test_a_second_layer_that_is_not_quite_the_first(second, error):
    manifest(Layer(0, 0, 0), Layer(1, 0, 0)).check()
    with pytest.raises(error):
        manifest(Layer(0, 0, 0), second).check()


def test_scales_of_other_types_are_checked_each():
    made = manifest(Layer(0, 0, 0, 1, 1.0), Layer(1, 0, 0, 1.0, 1), codec="fp8_e4m3")
    made.check()
    with pytest.raises(BadScale):
        replace(made, layers=(*made.layers, Layer(2, 0, 0, 0, 1.0))).check()


def test_a_manifest_may_be_read_from_any_bytes():
    key = new_key()
    sealed = seal(manifest(Layer(0, 0, 0), Layer(1, 0, 0)), key)
    assert open_sealed(bytearray(sealed), key) == open_sealed(sealed, key)
