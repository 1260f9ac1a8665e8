"""Models with several KV groups: windows, latents, shared layers, states; and their manifests."""

import pytest

from bridge.codecs import NotCarried, declared
from bridge.model import BadConfig, LayerGroup, ModelGeometry, OpaqueBytes, SharedLayer, UnsupportedModel, manifest_for
from bridge.sharding import DraftLayer, Layout
from bridge.wire import Coding, CodingKind, Element, Group, GroupKind, PayloadMap, Shard, SlotCodec
from bridge.wire.coding import opaque

FULL, WINDOW, LATENT, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.LATENT, GroupKind.STATE
BASE = {
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip
GEMMA3 = {**BASE, "model_type": "gemma3_text", "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"])}
GPT_OSS = {**BASE, "model_type": "gpt_oss", "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 3}
MISTRAL = {**BASE, "model_type": "mistral", "sliding_window": 4096}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip
GEMMA3N = {
    **BASE, "model_type": "gemma3n_text", "sliding_window": 512, "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
QWEN3_NEXT = {
    **BASE, "model_type": "qwen3_next", "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "full_attention_interval": 3, "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
STATES = {index: OpaqueBytes("test/gdn", 4096) for index in (0, 1, 3, 4)}


def geometry(config, states=None):
    return ModelGeometry.from_config(config, states)


def manifest(config, tokens=1000, codec="raw", states=None, **more):
    return manifest_for(geometry(config, states), codec, range(tokens), "r", model=bytes(32), lease=1, **more)


GROUPS = {
    "gemma3": (GEMMA3, None, [(WINDOW, (0, 1, 2, 3, 4), 4, 64, 512), (FULL, (5,), 4, 64, 0)]),
    "gpt-oss": (GPT_OSS, None, [(WINDOW, (0, 2, 4), 4, 64, 128), (FULL, (1, 3, 5), 4, 64, 0)]),
    "mistral": (MISTRAL, None, [(WINDOW, tuple(range(6)), 4, 64, 4096)]),
    "a window longer than the context": ({**GEMMA3, "max_position_embeddings": 512}, None, [(FULL, tuple(range(6)), 4, 64, 0)]),
    "deepseek": (DEEPSEEK, None, [(LATENT, (0, 1, 2, 3), 1, 576, 0)]),
    "gemma3n": (GEMMA3N, None, [(WINDOW, (0, 2), 4, 64, 512), (FULL, (1,), 4, 64, 0)]),
    "qwen3-next": (QWEN3_NEXT, STATES, [(STATE, (0, 1, 3, 4), 1, 16, 0), (FULL, (2, 5), 4, 64, 0)]),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups(case):
    config, states, expected = GROUPS[case]
    assert geometry(config, states).groups == tuple(LayerGroup(*group) for group in expected)


def test_shared_layers_are_their_owners():
    g = geometry(GEMMA3N)
    assert g.shared == ((3, 1), (4, 2), (5, 2))
    m = manifest(GEMMA3N)
    assert [layer.index for layer in m.layers] == [0, 1, 2]
    with pytest.raises(SharedLayer, match="layer 4 keeps no KV of its own, it reads that of layer 2"):
        manifest(GEMMA3N, layers=[0, 4])
    assert g.token_elements == 2 * 3 * 4 * 64


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "there is none"),  # the full-attention layer 1 would have no owner
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
    ],
)
def test_shared_layers_without_an_owner(change, word):
    with pytest.raises(BadConfig, match=word):
        geometry({**GEMMA3N, **change})


REFUSED = {
    "a type that alternates silently": ({**GEMMA3, "layer_types": None}, "does not list"),
    "a window of a type that may ignore it": ({**MISTRAL, "model_type": "llama"}, "does not list"),
    "shared layers of another type": ({**GEMMA3N, "model_type": "llama"}, "share"),
    "latents of another type": ({**DEEPSEEK, "model_type": "longcat_flash"}, "MLA"),
    "index keys": ({**DEEPSEEK, "index_head_dim": 128}, "index keys"),
    "latents beside windows": ({**DEEPSEEK, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, "latents beside"),
    "states of unknown size": (QWEN3_NEXT, "state-space"),
    "chunks": ({**GEMMA3, "layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_still_refused_is_named(case):
    config, word = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=word):
        geometry(config)


STATE_ERRORS = {
    "a layer too few": ({0: STATES[0]}, UnsupportedModel, "layers \\[1, 3, 4\\]"),
    "a layer too many": ({**STATES, 2: STATES[0]}, BadConfig, "layers \\[2\\]"),
    "an odd size": ({**STATES, 0: OpaqueBytes("test/gdn", 4090)}, BadConfig, "multiple of 16"),
    "no bytes": ({**STATES, 0: OpaqueBytes("test/gdn", 0)}, BadConfig, "multiple of 16"),
}


@pytest.mark.parametrize("case", STATE_ERRORS)
def test_states_are_checked(case):
    states, error, word = STATE_ERRORS[case]
    with pytest.raises(error, match=word):
        geometry(QWEN3_NEXT, states)


@pytest.mark.parametrize("change", [{"layer_types": None}, {"model_type": "falcon_h1"}, {"hybrid_override_pattern": "M*"}])
def test_hybrids_that_states_do_not_make_readable(change):
    with pytest.raises(UnsupportedModel):
        geometry({**QWEN3_NEXT, **change}, STATES)


def test_a_window_has_its_own_range():
    m = manifest(GEMMA3, 1000)
    assert m.groups == (Group(4, 64, 488, 1000, kind=WINDOW, window=512), Group(4, 64, 0, 1000))
    assert [layer.group for layer in m.layers] == [0] * 5 + [1]
    assert manifest(GEMMA3, 100).groups[0].first_token == 0
    assert manifest(GEMMA3, 1000, window_first={0: 480}).groups[0].first_token == 480
    assert manifest(GEMMA3, 1000, window_first={0: 0}).groups[0].first_token == 0
    # A prefix that the decoder has: the window begins no earlier than that.
    prefix = manifest(GEMMA3, 1000, first_token=700)
    assert [group.first_token for group in prefix.groups] == [700, 700]
    assert [group.first_token for group in manifest(GEMMA3, 1000, first_token=37).groups] == [488, 37]
    assert PayloadMap(m).chunk_count == 1


@pytest.mark.parametrize("wrong", [{0: 1000}, {0: -1}, {1: 5}])
def test_windows_that_cannot_be(wrong):
    with pytest.raises(BadConfig):
        manifest(GEMMA3, 1000, window_first=wrong)


def test_latents_travel_raw_or_opaque():
    m = manifest(DEEPSEEK, element=Element.BF16)
    assert m.groups == (Group(1, 576, 0, 1000, kind=LATENT),)
    assert m.codecs == (SlotCodec(Coding(CodingKind.RAW, 16, Element.BF16), Coding(CodingKind.NONE)),)
    rank = manifest(DEEPSEEK, heads=(16, 8), shard=Shard(1, 4))
    assert (rank.groups[0].head_first, rank.groups[0].head_count) == (0, 1)
    rows = {index: OpaqueBytes("vllm-0.32/fp8_ds_mla", 656) for index in range(4)}
    assert manifest(DEEPSEEK, opaque=rows).codecs == (SlotCodec(opaque("vllm-0.32/fp8_ds_mla", 656), Coding(CodingKind.NONE)),)
    with pytest.raises(NotCarried, match="latents"):
        manifest(DEEPSEEK, codec="turboquant_k8v4")


def test_opaque_rows_of_full_attention_and_windows():
    m = manifest(GPT_OSS, opaque={1: OpaqueBytes("test/int4", 72)}, per_layer={0: "fp8_e4m3"})
    assert [m.groups[layer.group].kind for layer in m.layers] == [WINDOW, LATENT, WINDOW, FULL, WINDOW, FULL]
    assert m.codecs[m.layers[0].codec] == declared("fp8_e4m3").for_layer(64, Element.BF16)
    with pytest.raises(NotCarried, match="window"):
        manifest(GPT_OSS, opaque={0: OpaqueBytes("test/int4", 72)})


@pytest.mark.parametrize(("tokens", "block"), [(1, 0), (16, 0), (17, 16), (1000, 992)])
def test_states_stand_in_the_last_tokens_block(tokens, block):
    m = manifest(QWEN3_NEXT, tokens, codec="turboquant_4bit_nc", states=STATES, shard=Shard(1, 2), heads=(2, 2))
    assert m.groups == (Group(2, 16, block, block + 16, 1, 1, STATE), Group(4, 64, 0, tokens, 2, 2))
    assert m.codecs[0] == SlotCodec(opaque("test/gdn", 256), Coding(CodingKind.NONE))
    assert [layer.group for layer in m.layers] == [0, 0, 1, 0, 0, 1]


def test_draft_layers_are_not_carried():
    g = geometry(DEEPSEEK)
    with pytest.raises(DraftLayer, match="layer 4 is none of the model's 4"):
        manifest_for(g, "raw", [1], "r", model=bytes(32), lease=1, layers=range(5))


def test_stages_of_a_mixed_model():
    layout = Layout.of(6, 4, 2, 3)
    seen = []
    for rank in range(layout.ranks):
        holding = layout.holding(rank)
        m = manifest(GPT_OSS, layers=list(holding.layers), heads=holding.heads, shard=layout.shard(rank))
        seen += [(layer.index, m.groups[layer.group].head_first) for layer in m.layers]
    assert sorted(seen) == [(index, head) for index in range(6) for head in (0, 2)]
