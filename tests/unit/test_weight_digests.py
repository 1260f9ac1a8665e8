"""Digests of whole weights, and of adapters."""

import json
import struct

import numpy as np
import pytest

from bridge.model import BadConfig, BadWeights, adapter_digest, model_digest, weight_files

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def data():
    return np.random.default_rng(5).integers(0, 256, 3 << 20, np.uint8)


def write(path, data):
    header = json.dumps({"w": {"dtype": "U8", "shape": [data.size], "data_offsets": [0, data.size]}}).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data.tobytes())
    return path


def tensors(path, places, text=None):
    """A safetensors file of one data, whose names lie where `places` says: name -> (begin, end)."""
    header = text or json.dumps(
        {name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} for name, (begin, end) in places.items()}
    )
    path.parent.mkdir(exist_ok=True)
    data = np.random.default_rng(5).bytes(8192)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
    return path


def configured(folder, text):
    """An adapter of one small tensor with this adapter_config.json."""
    tensors(folder / "adapter_model.safetensors", {"w": (0, 8192)})
    (folder / "adapter_config.json").write_text(text)
    return folder


def adapter(folder, data, **fields):
    write(folder / "adapter_model.safetensors", data)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": str(folder), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("at", [0, 4096 + 2000, 1 << 20, -1])
def test_every_byte_counts_where_the_whole_is_asked_for(tmp_path, data, at):
    changed = data.copy()
    changed[at] ^= 1
    for name in ("m.safetensors", "m.gguf"):
        one, same, other = (write(tmp_path / folder / name, given) for folder, given in (("1", data), ("2", data), ("3", changed)))
        assert model_digest(CONFIG, one, whole=True) == model_digest(CONFIG, same, whole=True)
        assert model_digest(CONFIG, one, whole=True) != model_digest(CONFIG, other, whole=True)


def test_a_sample_never_equals_the_whole(tmp_path, data):
    path = write(tmp_path / "m.safetensors", data[:100])
    assert model_digest(CONFIG, path) != model_digest(CONFIG, path, whole=True)


def test_the_order_of_many_files_does_not_count(tmp_path, data):
    files = [write(tmp_path / f"{n}.safetensors", data[n * 1000 : (n + 1) * 1000]) for n in range(9)]
    assert model_digest(CONFIG, files) == model_digest(CONFIG, files[::-1])
    assert model_digest(CONFIG, files) != model_digest(CONFIG, files[1:])


def test_every_file_of_a_folder_counts_that_its_index_names(tmp_path, data):
    folders = {name: tmp_path / name for name in ("one", "same", "two", "three")}
    for folder in folders.values():
        write(folder / "model.safetensors", data)
    write(folders["two"] / "vision.safetensors", data[:5000])
    write(folders["three"] / "vision.safetensors", data[:5001])
    (folders["same"] / "consolidated.safetensors").write_bytes(b"the same again, in another form")
    assert len({model_digest(CONFIG, folder) for folder in folders.values()}) == 3
    for folder in folders.values():
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model.safetensors"}}')
    assert len({model_digest(CONFIG, folder) for folder in folders.values()}) == 1
    for text in ("[]", "{", "{}", '{"weight_map": {"w": []}}', '{"weight_map": []}', "[" * 100_000):
        (folders["one"] / "model.safetensors.index.json").write_text(text)
        with pytest.raises(BadWeights, match="is no index of weights"):
            model_digest(CONFIG, folders["one"])


def test_an_adapter_is_its_content_wherever_it_lies(tmp_path, data):
    one = adapter_digest(adapter(tmp_path / "one", data))
    assert one == adapter_digest(adapter(tmp_path / "two", data))
    assert one != adapter_digest(adapter(tmp_path / "three", data ^ 1))
    assert one != adapter_digest(adapter(tmp_path / "four", data, lora_alpha=32))
    assert one != adapter_digest(adapter(tmp_path / "five", data, a_field_of_tomorrow=1))


def test_an_adapters_whole_counts_where_asked(tmp_path, data):
    changed = data.copy()
    changed[4096 + 2000] ^= 1
    one, other = adapter(tmp_path / "one", data), adapter(tmp_path / "other", changed)
    assert adapter_digest(one) == adapter_digest(other), "what the docstring of model_digest says of samples"
    assert adapter_digest(one, whole=True) != adapter_digest(other, whole=True)


def test_what_is_no_adapter_is_refused(tmp_path, data):
    with pytest.raises(BadWeights, match=r"holds no adapter_config\.json"):
        adapter_digest(tmp_path)
    folder = adapter(tmp_path / "a", data)
    for text in ("{", "[1]", "[" * 100_000, '{"r": 1e999}'):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(BadConfig):
            adapter_digest(folder)
    adapter(folder, data)
    (folder / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(BadWeights, match="no safetensors"):
        adapter_digest(folder)


def test_weights_in_pytorchs_own_form_count_too(tmp_path, data):
    folder = adapter(tmp_path / "a", data)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    one = adapter_digest(folder)
    (folder / "adapter_model.bin").write_bytes(data[::-1].tobytes())
    assert one != adapter_digest(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights"])
def test_a_model_of_other_files_is_refused(tmp_path, data, name):
    (tmp_path / name).write_bytes(data.tobytes())
    with pytest.raises(BadWeights, match="no safetensors"):
        model_digest(CONFIG, tmp_path / name)


@pytest.mark.parametrize("whole", [False, True])
def test_two_tensors_that_change_places_count(tmp_path, whole):
    """One data, the names exchanged: every reader gives other tensors."""
    for folder, one, other in (("a", (0, 4096), (4096, 8192)), ("b", (4096, 8192), (0, 4096))):
        tensors(tmp_path / folder / "adapter_model.safetensors", {"q.lora_A": one, "k.lora_A": other})
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    folders = [tmp_path / "a", tmp_path / "b"]
    assert len({adapter_digest(folder, whole=whole) for folder in folders}) == 2
    assert len({model_digest(CONFIG, folder / "adapter_model.safetensors", whole=whole) for folder in folders}) == 2


def test_the_order_of_names_in_a_header_does_not_count(tmp_path):
    places = {"q": (0, 4096), "k": (4096, 8192)}
    one, same = tensors(tmp_path / "1.safetensors", places), tensors(tmp_path / "2.safetensors", dict(reversed(places.items())))
    assert one.read_bytes() != same.read_bytes()
    assert model_digest(CONFIG, one) == model_digest(CONFIG, same)


NO_HEADERS = [
    '{"a": {"dtype": "U8", "shape": [4]}}',
    '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}',
    '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}',
    '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}',
    '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 8193]}}',
    '{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 4]}}',
    '{"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}',
]


@pytest.mark.parametrize("text", NO_HEADERS)
def test_headers_that_do_not_say_where_tensors_lie_are_refused(tmp_path, text):
    with pytest.raises(BadWeights, match="no safetensors header"):
        model_digest(CONFIG, tensors(tmp_path / "m.safetensors", {}, text))


def test_names_in_a_gguf_header_count(tmp_path, data):
    """They follow the vocabulary, far behind the first 4 KiB."""
    changed = data.copy()
    changed[4096 + 2000] ^= 1
    one, other = write(tmp_path / "1" / "m.gguf", data), write(tmp_path / "2" / "m.gguf", changed)
    assert model_digest(CONFIG, one) != model_digest(CONFIG, other)


@pytest.mark.parametrize("ending", ["bin", "pt"])
def test_names_anywhere_in_pytorchs_own_form_count(tmp_path, data, ending):
    digests = set()
    for at in (None, 4096 + 2000, 2 << 20):
        changed = data.copy()
        changed[at or 0] ^= at is not None
        folder = adapter(tmp_path / str(at), changed)
        (folder / "adapter_model.safetensors").rename(folder / f"adapter_model.{ending}")
        digests.add(adapter_digest(folder))
    assert len(digests) == 3


def test_adapters_of_too_many_tensors_are_refused(tmp_path, monkeypatch):
    path = tensors(tmp_path / "adapter_model.safetensors", {f"t{n}": (n, n + 1) for n in range(5)})
    (tmp_path / "adapter_config.json").write_text("{}")
    assert len(adapter_digest(tmp_path)) == 32
    monkeypatch.setattr(weight_files, "MAX_ADAPTER_TENSORS", 4)
    with pytest.raises(BadWeights, match="has 5 tensors, an adapter at most 4; serve this adapter without hand-off"):
        adapter_digest(tmp_path)
    monkeypatch.setattr(weight_files, "MAX_ADAPTER_HEADER_BYTES", 100)
    with pytest.raises(BadWeights, match="an adapter's at most 100; serve"):
        adapter_digest(tmp_path)
    assert len(model_digest(CONFIG, path)) == 32, "a model may have more"


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
def test_patterns_of_an_adapter_count_in_their_order_and_by_every_name(tmp_path, field):
    """vLLM takes the first that matches a module's name."""
    patterns = [
        '{"q_proj": 16, "layers.0.self_attn.q_proj": 64}',
        '{"layers.0.self_attn.q_proj": 64, "q_proj": 16}',
        '{"prefix": 64}',
        '{"prefix": 16}',
        '{"dropout": 16}',
        '{"rope_theta": 16}',
        '{"rope_parameters": {"rope_theta": 16, "rope_type": "default"}}',
        '{"q_proj": null, "layers.0.self_attn.q_proj": 64}',
        '{"layers.0.self_attn.q_proj": 64}',
        '{"pairs": [["q_proj", 16]]}',
        '{"q_proj": 16}',
        '[["q_proj", 16]]',
        "{}",
    ]
    folders = [configured(tmp_path / str(n), f'{{"r": 8, "{field}": {text}}}') for n, text in enumerate(patterns)]
    assert len({adapter_digest(folder) for folder in folders}) == len(patterns)


def test_the_order_of_an_adapters_own_fields_does_not_count(tmp_path):
    one = configured(tmp_path / "1", '{"r": 8, "lora_alpha": 16, "revision": null}')
    assert adapter_digest(one) == adapter_digest(configured(tmp_path / "2", '{"lora_alpha": 16.0, "r": 8}'))


def test_long_names_are_refused_and_never_cut(tmp_path):
    name = "x" * 200
    assert model_digest({"a": {name: 1}}) != model_digest({"a": {name[1:]: 1}})
    for config in ({name + "1": 1}, {"a": {name + "1": 1, name + "2": 2}}, {"quantization_config": {name + "1": 1}}):
        with pytest.raises(BadConfig, match=r"a name of 201 characters.*at most 200"):
            model_digest(config)
        with pytest.raises(BadConfig, match="a name of 201 characters"):
            adapter_digest(configured(tmp_path / "a", json.dumps(config)))


def test_names_that_are_alike_as_texts_are_refused():
    with pytest.raises(BadConfig, match="alike"):
        model_digest({"layers": {1: "full", "1": "window"}})


def test_a_quantization_counts_in_its_order_and_by_every_name():
    """Its fields may be patterns of modules' names too."""
    kinds = [
        {"a.*": {"bits": 4}, "b": {"bits": 8}},
        {"b": {"bits": 8}, "a.*": {"bits": 4}},
        {"a.*": {"bits": 4}},
        {"a.*": {"bits": 4}, "prefix": {}},
    ]
    assert len({model_digest({**CONFIG, "quantization_config": {"quant_method": "gptq", "dynamic": kind}}) for kind in kinds}) == 4


def test_an_adapters_config_that_is_too_large_is_called_so(tmp_path):
    with pytest.raises(BadConfig, match="is too large; at most 1 MiB"):
        adapter_digest(configured(tmp_path / "a", json.dumps({"r": ["x" * 1000] * 1100})))


def test_what_a_configuration_says_twice_counts():
    """transformers 5 takes the inner rope_theta, and vLLM with it."""
    found = [
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 1.0,
        },
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 1.0},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": "dynamic"},
        {"rope_theta": 5e5, "rope_scaling": {}},
    ]
    digests = [model_digest({**CONFIG, **rope}) for rope in found]
    assert len(set(digests)) == 8
    assert digests[2] == digests[6], "the same twice"
    assert digests[7] == digests[9], "nothing"


def test_the_range_of_initial_weights_counts():
    """Some models scale their embeddings by it (HRM)."""
    assert len({model_digest({**CONFIG, "initializer_range": scale}) for scale in (0.01, 0.02)}) == 2
