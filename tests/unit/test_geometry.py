"""Geometry from configs of many families, the refusals, and the model digest."""

import json
import struct

import numpy as np
import pytest

from bridge.codecs import CODECS, NotCarried, UnknownCodec
from bridge.model import BadConfig, BadWeights, ModelGeometry, UnsupportedModel, manifest_for, model_digest
from bridge.wire import ContentKind, Element, PayloadMap, Shard, token_digest

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}  # fmt: skip

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "sliding_window": 8192, "use_sliding_window": False, "max_window_layers": 12,
    "torch_dtype": "bfloat16",
}  # fmt: skip

# config, (layers, kv heads, head dim, query heads, element)
FAMILIES = {
    "llama": (LLAMA, (32, 8, 128, 32, Element.BF16)),
    "llama without kv heads": (
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "torch_dtype": "float16"},
        (32, 32, 128, 32, Element.FP16),
    ),
    "mistral": (
        {
            "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "sliding_window": None, "dtype": "bfloat16",
        },
        (40, 8, 128, 32, Element.BF16),
    ),
    "qwen2 with its window off": (QWEN2, (24, 2, 64, 14, Element.BF16)),
    "qwen2 with a window in no layer": ({**QWEN2, "use_sliding_window": True, "max_window_layers": 24}, (24, 2, 64, 14, Element.BF16)),
    "qwen3": (
        {
            "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "layer_types": ["full_attention"] * 28, "dtype": "torch.bfloat16",
        },
        (28, 8, 128, 16, Element.BF16),
    ),
    "gemma": (
        {
            "model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
            "head_dim": 256,
        },
        (18, 1, 256, 8, Element.BF16),
    ),
    "phi": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "torch_dtype": "float16"},
        (32, 32, 80, 32, Element.FP16),
    ),
    "phi3 with a window longer than its context": (
        {
            "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "sliding_window": 262144, "max_position_embeddings": 131072,
        },
        (32, 32, 96, 32, Element.BF16),
    ),
    "falcon 7b": (
        {
            "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71,
            "multi_query": True, "new_decoder_architecture": False,
        },
        (32, 1, 64, 71, Element.BF16),
    ),
    "falcon 40b": (
        {
            "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
            "multi_query": True, "new_decoder_architecture": True,
        },
        (60, 8, 64, 128, Element.BF16),
    ),
    "falcon 40b, old spelling": (
        {"model_type": "RefinedWeb", "hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8, "new_decoder_architecture": True},
        (60, 8, 64, 128, Element.BF16),
    ),
    "falcon rw": (
        {"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "multi_query": False},
        (24, 32, 64, 32, Element.BF16),
    ),
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "torch_dtype": "float32"}, (12, 12, 64, 12, Element.FP32)),
    "gpt_bigcode": ({"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48}, (40, 1, 128, 48, Element.BF16)),
    "gpt_bigcode without multi query": (
        {"model_type": "gpt_bigcode", "n_embd": 768, "n_layer": 12, "n_head": 12, "multi_query": False},
        (12, 12, 64, 12, Element.BF16),
    ),
    "opt": (
        {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "word_embed_proj_dim": 768},
        (12, 12, 64, 12, Element.BF16),
    ),
    "bloom": ({"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16}, (24, 16, 64, 16, Element.BF16)),
    "bloom, old spelling": (
        {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
        (24, 16, 64, 16, Element.BF16),
    ),
    "mpt": (
        {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "attn_config": {"attn_type": "multihead_attention"}},
        (32, 32, 128, 32, Element.BF16),
    ),
    "mpt, grouped": (
        {
            "model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32,
            "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8, "sliding_window_size": -1},
        },
        (32, 8, 128, 32, Element.BF16),
    ),
    "mpt, multi query": (
        {"model_type": "mpt", "d_model": 2048, "n_layers": 24, "n_heads": 16, "attn_config": {"attn_type": "multiquery_attention"}},
        (24, 1, 128, 16, Element.BF16),
    ),
    "chatglm": (
        {
            "model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128,
            "multi_query_attention": True, "multi_query_group_num": 2,
        },
        (28, 2, 128, 32, Element.BF16),
    ),
    "nested text config": (
        {"model_type": "qwen2_5_vl", "dtype": "float16", "vision_config": {"num_heads": 3}, "text_config": {**QWEN2, "torch_dtype": None}},
        (24, 2, 64, 14, Element.FP16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    config, expected = FAMILIES[family]
    g = ModelGeometry.from_config(config)
    assert (g.layers, g.kv_heads, g.head_dim, g.query_heads, g.element) == expected


def test_objects_with_to_dict_are_read():
    class Config:
        def to_dict(self):
            return LLAMA

    assert ModelGeometry.from_config(Config()) == ModelGeometry(32, 8, 128, 32, Element.BF16)
    assert ModelGeometry.from_config(Config()).token_elements == 2 * 32 * 8 * 128


HOSTILE = {
    "huge layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "an integer of a million digits": ({"num_hidden_layers": 1 << 3_000_000}, "bits"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative heads": ({"num_attention_heads": -4}, "num_attention_heads"),
    "true heads": ({"num_key_value_heads": True}, "no integer"),
    "half a head": ({"num_key_value_heads": 8.0}, "no integer"),
    "text": ({"num_hidden_layers": "32" * 10_000}, "no integer"),
    "missing layers": ({"num_hidden_layers": None}, "does not say"),
    "uneven groups": ({"num_key_value_heads": 5}, "evenly"),
    "more kv heads than heads": ({"num_key_value_heads": 64}, "evenly"),
    "hidden size that does not divide": ({"hidden_size": 4100}, "no multiple"),
    "huge hidden size": ({"hidden_size": 1 << 60}, "hidden_size"),
    "huge head dim": ({"head_dim": 1 << 20}, "head_dim"),
    "two spellings that disagree": ({"n_layer": 31}, "contradicts"),
    "unknown dtype": ({"torch_dtype": "float8_e4m3fn" + "x" * 10_000}, "torch_dtype"),
    "layer types of another model": ({"layer_types": ["full_attention"] * 31}, "layer_types"),
    "a flag that is none": ({"use_sliding_window": "yes"}, "use_sliding_window"),
    "silent kv heads of a grouped family": ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
    "silent head dim of a family with its own": ({"model_type": "qwen3"}, "head_dim"),
    "multi query with many heads": ({"multi_query": True}, "contradict"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_numbers_are_refused_in_a_sentence(case):
    change, word = HOSTILE[case]
    with pytest.raises(BadConfig) as caught:
        ModelGeometry.from_config({**LLAMA, **change})
    assert word in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("config", [None, 7, "llama", [1, 2], object()])
def test_what_is_no_config(config):
    with pytest.raises(BadConfig, match="mapping"):
        ModelGeometry.from_config(config)


UNSUPPORTED = {
    "latent attention": ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "MLA"),
    "a window": ({"sliding_window": 4096}, "sliding windows"),
    "windows in some layers without a size": ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "sliding_attention"),
    "index keys beside latents": ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}, "index"),
    "qwen2 with its window on": ({"sliding_window": 8192, "use_sliding_window": True, "max_window_layers": 12}, "sliding windows"),
    "a family that alternates silently": ({"model_type": "gemma2", "head_dim": 256}, "some layers"),
    "linear attention": ({"layer_types": ["linear_attention", "full_attention"] * 16}, "linear_attention"),
    "chunks": ({"attention_chunk_size": 8192}, "chunked"),
    "a state-space family": ({"model_type": "mamba2"}, "state-space"),
    "a hybrid": ({"hybrid_override_pattern": "M-M*-"}, "state-space"),
    "an encoder": ({"is_encoder_decoder": True}, "cross attention"),
    "cross attention layers": ({"cross_attention_layers": [3, 8]}, "cross attention"),
    "added cross attention": ({"add_cross_attention": True}, "cross attention"),
    "kv heads by layer": ({"num_key_value_heads": [8] * 32}, "differs between layers"),
    "per-layer config": ({"per_layer_config": {"0": {"num_key_value_heads": 4}}}, "differ"),
    "layers that share KV": ({"num_kv_shared_layers": 10}, "share"),
    "unequal K and V": ({"head_dim": 192, "v_head_dim": 128}, "unequal"),
    "a head dimension off the grid": ({"head_dim": 100}, "multiple of 16"),
    "MPT's window": ({"attn_config": {"sliding_window_size": 1024}}, "sliding windows"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.parametrize("nested", [False, True])
def test_unsupported_features_are_named(case, nested):
    change, word = UNSUPPORTED[case]
    config = {**LLAMA, **change}
    with pytest.raises(UnsupportedModel) as caught:
        ModelGeometry.from_config({"model_type": "wrapped", "text_config": config} if nested else config)
    assert word in str(caught.value)


# -- digest ---------------------------------------------------------------------------------------------------------------------------

SAME = {
    "names and paths": {"_name_or_path": "/models/a", "architectures": ["X"], "tokenizer_class": "T"},
    "versions": {"transformers_version": "4.57.0"},
    "dtype": {"torch_dtype": "float16", "dtype": "float32"},
    "use_cache": {"use_cache": False},
    "sampling": {"temperature": 0.2, "eos_token_id": [1, 2]},
    "null": {"attention_bias": None},
    "a float that is whole": {"hidden_size": 4096.0},
    "rope as transformers 5 writes it": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"factor": 8, "rope_type": "llama3", "rope_theta": 500000},
    },
    "rope_scaling's old name for its type": {"rope_scaling": {"factor": 8.0, "type": "llama3"}},
}
OTHER = {
    "theta": {"rope_theta": 10000.0},
    "scaling": {"rope_scaling": {"factor": 4.0, "rope_type": "llama3"}},
    "epsilon": {"rms_norm_eps": 1e-06},
    "vocabulary": {"vocab_size": 128257},
    "layers": {"num_hidden_layers": 31},
    "a field that nobody has thought of": {"key_multiplier": 0.5},
    "false is not absent": {"attention_bias": False},
}


@pytest.mark.parametrize("case", SAME)
def test_digest_keeps(case):
    assert model_digest({**LLAMA, **SAME[case]}) == model_digest(dict(reversed(LLAMA.items())))


@pytest.mark.parametrize("case", OTHER)
def test_digest_changes(case):
    assert model_digest({**LLAMA, **OTHER[case]}) != model_digest(LLAMA)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1 << 70, object(), "x" * 100_000, [[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]], [0] * 200_000]
)
def test_digest_refuses_what_is_no_small_json(value):
    with pytest.raises(BadConfig):
        model_digest({**LLAMA, "field": value})


def write_safetensors(path, data, name="model.weight", metadata=None):
    header = {name: {"dtype": "F32", "shape": [data.size // 4], "data_offsets": [0, data.size]}}
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())
    return path


@pytest.fixture
def data():
    return np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8)


def test_weights_count(tmp_path, data):
    first = model_digest(LLAMA, write_safetensors(tmp_path / "model.safetensors", data))
    assert len(first) == 32
    assert first != model_digest(LLAMA)
    assert first == model_digest(LLAMA, tmp_path)
    assert first == model_digest(LLAMA, [write_safetensors(tmp_path / "renamed.safetensors", data, metadata={"format": "pt"})])
    assert first != model_digest(LLAMA, write_safetensors(tmp_path / "other.safetensors", data, name="other.weight"))
    for at in (0, data.size // 2, data.size - 1):
        # All weights of a fine-tuning differ; a byte at an end, or a stretch in between, is enough.
        changed = data.copy()
        changed[at : at + (1 if at != data.size // 2 else 1 << 15)] ^= 1
        assert first != model_digest(LLAMA, write_safetensors(tmp_path / f"{at}.safetensors", changed))


def test_what_lies_between_the_slices_is_missed(tmp_path, data):
    # The docstring says so; if this fails, say something else there.
    changed = data.copy()
    changed[4096 + 2000] ^= 1
    same = model_digest(LLAMA, write_safetensors(tmp_path / "a.safetensors", data))
    assert same == model_digest(LLAMA, write_safetensors(tmp_path / "b.safetensors", changed))


def test_gguf_counts(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data.tobytes())
    one = model_digest(LLAMA, tmp_path)
    (tmp_path / "m.gguf").write_bytes(data[:-1].tobytes())
    assert one != model_digest(LLAMA, tmp_path)
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(BadWeights, match=r"2 \.gguf"):
        model_digest(LLAMA, tmp_path)


NO_SAFETENSORS = [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a":1}  ', b"\x04" + bytes(7) + b"nope"]


@pytest.mark.parametrize("content", NO_SAFETENSORS)
def test_bad_safetensors(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadWeights):
        model_digest(LLAMA, path)


def test_absent_weights(tmp_path):
    with pytest.raises(BadWeights, match="neither"):
        model_digest(LLAMA, tmp_path)
    with pytest.raises(BadWeights, match="cannot be read"):
        model_digest(LLAMA, tmp_path / "gone.safetensors")


# -- manifest -------------------------------------------------------------------------------------------------------------------------

SMALL = ModelGeometry(layers=6, kv_heads=4, head_dim=64, query_heads=8)


@pytest.mark.parametrize("codec", CODECS)
def test_manifest_of_one_codec(codec):
    m = manifest_for(SMALL, codec, range(100), "r1", model=bytes(32), lease=7, generation=2, chunk_tokens=48, first_token=20)
    assert (m.first_token, m.end_token, m.lease, m.generation) == (20, 100, 7, 2)
    assert m.content == ((ContentKind.TOKENS, token_digest(list(range(100)))),)
    assert m.codecs == (CODECS[codec].for_layer(64, Element.BF16),)
    assert [layer.index for layer in m.layers] == list(range(6))
    assert PayloadMap(m).chunk_count == 3


def test_manifest_with_other_codecs_at_the_ends():
    ends = dict.fromkeys((0, 1, 4, 5), "fp8_e4m3")
    m = manifest_for(
        SMALL, "turboquant_4bit_nc", [1, 2, 3], "r", model=bytes(32), lease=1, per_layer=ends, scales={0: (0.5, 0.25)}, element=Element.FP16
    )
    names = ("fp8_e4m3", "fp8_e4m3", "turboquant_4bit_nc", "turboquant_4bit_nc", "fp8_e4m3", "fp8_e4m3")
    assert [m.codecs[layer.codec] for layer in m.layers] == [CODECS[name].for_layer(64, Element.FP16) for name in names]
    assert (m.layers[0].key_scale, m.layers[0].value_scale, m.layers[1].key_scale) == (0.5, 0.25, 1.0)


def test_manifest_of_a_rank():
    shard = Shard(tp_rank=1, tp_size=2)
    lora = (ContentKind.LORA, b"\1" * 32)
    m = manifest_for(
        SMALL,
        "raw",
        [5],
        "r",
        model=bytes(32),
        lease=1,
        layers=range(2, 4),
        heads=(2, 2),
        shard=shard,
        content=[lora],
        element=Element.FP32,
    )
    assert (m.groups[0].heads, m.groups[0].head_first, m.groups[0].head_count) == (4, 2, 2)
    assert [layer.index for layer in m.layers] == [2, 3]
    assert m.shard == shard
    assert m.content[1] == lora


def test_manifest_refusals():
    with pytest.raises(BadConfig, match="no layer 6"):
        manifest_for(SMALL, "raw", [1], "r", model=bytes(32), lease=1, per_layer={6: "raw"})
    with pytest.raises(UnknownCodec, match="turboquant_4bit_nc"):
        manifest_for(SMALL, "turboquant_4bit", [1], "r", model=bytes(32), lease=1)
    with pytest.raises(NotCarried, match="80"):
        manifest_for(ModelGeometry(2, 2, 80, 2), "turboquant_3bit_nc", [1], "r", model=bytes(32), lease=1)
