"""Digests of whole weights, and of adapters."""

import json
import struct

import numpy as np
import pytest

from bridge.model import BadConfig, BadWeights, adapter_digest, model_digest

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def data():
    return np.random.default_rng(5).integers(0, 256, 3 << 20, np.uint8)


def write(path, data):
    header = json.dumps({"w": {"dtype": "U8", "shape": [data.size], "data_offsets": [0, data.size]}}).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data.tobytes())
    return path


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
