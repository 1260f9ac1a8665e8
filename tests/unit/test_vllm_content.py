"""What the vLLM connector compares of a prompt: adapters whose files change, images that are only counted, embeddings that are none."""

import itertools
import json
import os
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bridge.model import adapter_digest
from bridge.vllm import content
from bridge.vllm.checkpoint import ELSEWHERE, on_this_host
from bridge.vllm.content import Adapters, content_of
from bridge.vllm.engine import QUANTIZATION_FILES, digest, geometry, hashes_images
from bridge.vllm.errors import AdapterUnknown, UnsupportedEngine
from bridge.wire.errors import BadContent

TIMES = (1_700_000_000, 1_700_000_000)


def adapter(folder, seed):
    """Rewritten in place where it is there already, with the times that it had: as `cp -p` and `rsync --inplace -t` do."""
    folder.mkdir(exist_ok=True)
    data = np.random.default_rng(seed).bytes(256)
    header = json.dumps({"w": {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}}).encode()
    time.sleep(0.02)  # longer than a file system's tick
    for name, written in (
        ("adapter_config.json", b'{"r": 8}'),
        ("adapter_model.safetensors", struct.pack("<Q", len(header)) + header + data),
    ):
        with open(folder / name, "r+b" if (folder / name).exists() else "xb") as file:
            file.write(written)
        os.utime(folder / name, TIMES)
    return folder


def lora(folder, number=1, name="sql", inplace=False, three=False):
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), load_inplace=inplace, is_3d_lora_weight=three)


def made(**fields):
    nothing = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "prompt_is_token_ids": None, "cache_salt": None}
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], **{**nothing, **fields})


@pytest.fixture
def settled(monkeypatch):
    """As if every file had been written long ago."""
    monkeypatch.setattr(content, "_SETTLED_SECONDS", -1.0)


@pytest.fixture
def reads(monkeypatch):
    """The folders that were read."""
    found = []
    real = content.adapter_digest
    monkeypatch.setattr(content, "adapter_digest", lambda folder, whole: found.append(folder) or real(folder, whole=whole))
    return found


@pytest.mark.usefixtures("settled")
def test_a_file_of_the_same_size_and_times_is_read_again(tmp_path):
    adapters, folder = Adapters(True), adapter(tmp_path / "a", 1)
    before = (folder / "adapter_model.safetensors").stat()
    one = adapters.digest("sql", str(folder))
    adapter(folder, 2)
    after = (folder / "adapter_model.safetensors").stat()
    assert (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)
    assert adapters.digest("sql", str(folder)) == adapter_digest(folder, whole=True) != one


def test_a_digest_is_remembered_once_its_files_are_settled(tmp_path, reads, monkeypatch):
    adapters, folder = Adapters(False), adapter(tmp_path / "a", 1)
    assert adapters.digest("sql", str(folder)) == adapters.digest("sql", str(folder))
    assert len(reads) == 2, "changed just now, so it might change again within the same tick"
    later = time.time() + 60
    monkeypatch.setattr(content.time, "time", lambda: later)
    assert adapters.digest("sql", str(folder)) == adapters.digest("sql", str(folder))
    assert len(reads) == 3


@pytest.mark.usefixtures("settled")
def test_what_changes_while_it_is_read_has_no_digest(tmp_path, monkeypatch):
    adapters, folder = Adapters(False), adapter(tmp_path / "a", 1)
    real = content.adapter_digest
    monkeypatch.setattr(content, "adapter_digest", lambda folder, whole: (real(folder, whole=whole), adapter(folder, 2))[0])
    with pytest.raises(AdapterUnknown, match="change while they are read"):
        adapters.of(lora(folder))
    monkeypatch.setattr(content, "adapter_digest", real)
    with pytest.raises(AdapterUnknown, match="could not be compared then"):  # vLLM has loaded it all the same, somewhere between
        adapters.of(lora(folder))
    assert adapters.of(lora(folder, 2, "sql-2")) == adapter_digest(folder), "nothing of it was kept"


@pytest.mark.usefixtures("settled")
def test_the_time_that_reading_takes_settles_nothing(tmp_path, monkeypatch):
    """Written once more in the tick in which it was looked at, and before it was read: the digest would be kept for the first files."""
    monkeypatch.setattr(content, "_SETTLED_SECONDS", 2.0)
    adapters, folder, clock = Adapters(True), adapter(tmp_path / "a", 1), SimpleNamespace(time=time.time)
    monkeypatch.setattr(content, "time", clock)
    real = content.adapter_digest

    def slow(folder, whole):
        clock.time = lambda: time.time() + 60
        return real(folder, whole=whole)

    monkeypatch.setattr(content, "adapter_digest", slow)
    adapters.digest("sql", str(folder))
    assert not adapters._known


@pytest.mark.parametrize("spoilt", ["gone", "half", "too long"])
def test_an_adapter_that_could_not_be_compared_at_first_is_not_later(tmp_path, spoilt):
    """vLLM has loaded what was there before, or loads what is there a moment later; nobody knows what that is."""
    adapters, folder = Adapters(False), tmp_path / "a"
    if spoilt != "gone":
        adapter(folder, 1)
        (folder / "adapter_config.json").write_bytes(b"{" if spoilt == "half" else b" " * (1 << 21))
    adapters.used(lora(folder))
    adapter(folder, 2)
    (folder / "adapter_config.json").write_bytes(b'{"r": 8}')
    with pytest.raises(AdapterUnknown, match="could not be compared then"):
        adapters.of(lora(folder))
    assert adapters.of(lora(folder, 2, "sql-2")) == adapter_digest(folder)


def test_a_hubs_name_that_is_not_here_yet_is_compared_later(tmp_path, monkeypatch):
    """vLLM downloads it for its first request, so nothing else can have been loaded."""
    adapters, folder, here = Adapters(False), adapter(tmp_path / "a", 1), []
    monkeypatch.setattr(content, "on_this_host", lambda path: here[0] if here else None)
    adapters.used(lora("someone/sql"))
    here.append(folder)
    assert adapters.of(lora("someone/sql")) == adapter_digest(folder)


def test_new_files_under_a_loaded_number_that_cannot_be_compared_end_what_it_was(tmp_path):
    adapters, one, other = Adapters(False), adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    adapters.used(lora(one))
    (other / "adapter_config.json").write_bytes(b"{")
    adapters.used(lora(other, inplace=True))
    with pytest.raises(AdapterUnknown, match="another was loaded in its place"):
        adapters.of(lora(one))


def test_files_that_change_under_a_loaded_adapter_end_its_hand_offs(tmp_path):
    adapters, folder = Adapters(False), adapter(tmp_path / "a", 1)
    adapters.used(lora(folder))
    adapter(folder, 2)
    for _ in range(2):
        with pytest.raises(AdapterUnknown, match=r"'sql' have changed since this engine first used it, .*; load it under a new name"):
            adapters.of(lora(folder))
        adapter(folder, 1)  # as it was, but vLLM may have loaded the other meanwhile
    with pytest.raises(AdapterUnknown, match="have changed"):
        adapters.of(lora(folder, number=2))  # the prefix cache knows it by its name and path
    assert adapters.of(lora(folder, number=3, name="sql-2")) == adapter_digest(folder)


def test_another_path_under_a_loaded_number_is_not_loaded(tmp_path):
    adapters, one, other = Adapters(False), adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    adapters.used(lora(one))
    with pytest.raises(AdapterUnknown, match="have changed"):
        adapters.of(lora(other))
    with pytest.raises(AdapterUnknown, match="have changed"):
        adapters.of(lora(other, number=2))  # the prefix cache has what the first one computed under this name and path


def test_an_adapter_loaded_in_place_is_the_new_one(tmp_path):
    adapters, one, other = Adapters(False), adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    adapters.used(lora(one))
    assert adapters.of(lora(other, inplace=True)) == adapter_digest(other)
    adapter(other, 3)
    with pytest.raises(AdapterUnknown, match="have changed"):
        adapters.of(lora(other, inplace=True))  # loaded again, but prefixes that it computed before are cached


def test_no_first_digest_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "MAX_ADAPTERS", 2)
    adapters, folder = Adapters(False), adapter(tmp_path / "a", 1)
    for number in (1, 2):
        adapters.of(lora(folder, number, f"name {number}"))
    with pytest.raises(AdapterUnknown, match="has used 2 adapters"):
        adapters.of(lora(folder, 3, "name 3"))
    assert adapters.of(lora(folder, 1, "name 1")) == adapter_digest(folder)


def test_the_format_that_a_request_names_counts(tmp_path):
    folder = adapter(tmp_path / "a", 1)
    assert Adapters(False).of(lora(folder)) != Adapters(False).of(lora(folder, three=True))
    adapters = Adapters(False)
    adapters.of(lora(folder, 1))
    with pytest.raises(AdapterUnknown, match="have changed since"):  # vLLM's prefix cache knows no format
        adapters.of(lora(folder, 2, three=True))


def test_what_to_do_about_an_adapter_is_said(tmp_path):
    folder = adapter(tmp_path / "a", 1)
    for text, says in ((b"{", "is no JSON; give vLLM the adapter's own folder"), (b" " * (1 << 21), "is too large; at most 1 MiB")):
        (folder / "adapter_config.json").write_bytes(text)
        with pytest.raises(AdapterUnknown, match=says):
            Adapters(False).of(lora(folder))


@pytest.mark.parametrize("name", ["", "sql:", "a:b:"])
def test_images_that_are_counted_are_refused(name):
    for modality in ("image", "video", "vision_chunk"):
        image = SimpleNamespace(identifier=f"{name}renderer0-mm-12-{modality}-3")
        with pytest.raises(UnsupportedEngine, match=r"does not hash images.*leave mm_processor_cache_gb or prefix caching on"):
            content_of(made(mm_features=[image]), Adapters(False))
    hashed = made(mm_features=[SimpleNamespace(identifier=f"{name}{'5f' * 32}")])
    assert len(content_of(hashed, Adapters(False))) == 2
    with pytest.raises(UnsupportedEngine):
        content_of(hashed, Adapters(False), images_are_hashed=False)


def test_images_are_counted_where_both_caches_are_off():
    for cache, prefixes in itertools.product((0, 4), (False, True)):
        engine = SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache)),
            cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        )
        assert hashes_images(engine) == bool(cache or prefixes)
    engine.model_config.multimodal_config = None
    assert hashes_images(engine)


def test_lists_of_texts_do_not_run_together():
    lists = [["a\0b", "c"], ["a", "b\0c"], ["a\0b\0c"], ["a", "b", "c"], ["", "a\0b", "c"], ["ab", "c"], ["\ud800"]]
    digests = [content_of(made(mm_features=[SimpleNamespace(identifier=text) for text in texts]), Adapters(False)) for texts in lists]
    assert len(set(digests)) == len(lists)


NO_VECTORS = {
    "one number": lambda: torch.tensor(1.0),
    "conjugated": lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "without data": lambda: torch.empty(2, 2, device="meta"),
    "integers": lambda: torch.ones(2, 2, dtype=torch.int64),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", NO_VECTORS)
def test_embeddings_that_are_none_are_refused(kind):
    with pytest.raises(BadContent, match="send a dense tensor"):
        content_of(made(prompt_embeds=NO_VECTORS[kind]()), Adapters(False))


def test_embeddings_are_compared_by_their_values():
    vectors = torch.arange(12.0).reshape(3, 4)
    negated = torch._neg_view(-vectors)
    assert negated.is_neg()
    same = [vectors, vectors.T.contiguous().T, vectors.clone().requires_grad_(), negated]
    assert len({content_of(made(prompt_embeds=one), Adapters(False)) for one in same}) == 1
    others = [vectors, -vectors, vectors.reshape(4, 3), vectors.to(torch.bfloat16), vectors[:0]]
    assert len({content_of(made(prompt_embeds=one), Adapters(False)) for one in others}) == len(others)


def test_quantization_files_beside_the_configuration_count(tmp_path):
    """vLLM reads them where config.json has no quantization_config."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    engine = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, hf_overrides={}), load_config=SimpleNamespace(load_format="dummy")
    )
    found = [digest(engine, False)]
    for name in QUANTIZATION_FILES:
        for text in ('{"prefix": 4}', '{"prefix": 8}'):
            (tmp_path / name).write_text(text)
            found.append(digest(engine, False))
    assert len(set(found)) == len(found) == 7
    (tmp_path / name).write_text("{")
    with pytest.raises(UnsupportedEngine, match=r"quant_config\.json cannot be read as JSON"):
        digest(engine, False)


def weights(path, seed, name="w"):
    data = np.random.default_rng(seed).bytes(256)
    header = json.dumps({name: {"dtype": "U8", "shape": [256], "data_offsets": [0, 256]}}).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def checkpoint(folder, files, index=None, of="model"):
    """files: name -> seed of its one tensor. index: the files that it names."""
    for name, seed in files.items():
        weights(folder / name, seed)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if index is not None:
        (folder / f"{of}.safetensors.index.json").write_text(json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(index)}}))
    return folder


def engine_of(folder, load_format="auto", **model):
    config = SimpleNamespace(model=str(folder), revision=None, hf_overrides={}, **model)
    return SimpleNamespace(model_config=config, load_config=SimpleNamespace(load_format=load_format, download_dir=None))


FILES = {"a.safetensors": 1, "b.safetensors": 2}
SWAPPED = {"a.safetensors": 2, "b.safetensors": 1}


def test_what_an_index_leaves_out_is_not_compared(tmp_path):
    """vLLM loads what model.safetensors.index.json names, so one folder's files may be two models."""
    one = checkpoint(tmp_path / "1", FILES, ["a.safetensors"])
    found = {
        digest(engine_of(one), False),
        digest(engine_of(checkpoint(tmp_path / "2", FILES, ["b.safetensors"])), False),
        digest(engine_of(checkpoint(tmp_path / "3", FILES)), False),
    }
    assert len(found) == 3
    alone = checkpoint(tmp_path / "4", {"a.safetensors": 1})
    assert digest(engine_of(one), False) == digest(engine_of(alone), False), "the same weights"
    assert digest(engine_of(checkpoint(tmp_path / "5", SWAPPED, ["b.safetensors"])), False) == digest(engine_of(alone), False)
    with pytest.raises(UnsupportedEngine, match=r"names 'c\.safetensors', which is not beside it"):
        digest(engine_of(checkpoint(tmp_path / "6", FILES, ["c.safetensors"])), False)
    (one / "model.safetensors.index.json").write_text('{"weight_map": 1}')
    with pytest.raises(UnsupportedEngine, match="is no index of weights; copy the whole"):
        digest(engine_of(one), False)


def test_two_files_of_one_tensor_that_change_names_count(tmp_path):
    """vLLM takes what the file holds whose name comes last."""
    one, other = (digest(engine_of(checkpoint(tmp_path / name, files)), False) for name, files in (("1", FILES), ("2", SWAPPED)))
    assert one != other


def test_the_format_that_vllm_loads_counts(tmp_path):
    """A folder of Mistral's has the weights twice, of which load_format chooses: one of them may be of another fine-tuning."""
    both = checkpoint(tmp_path / "both", {"consolidated.safetensors": 1, "model.safetensors": 2})
    official = checkpoint(tmp_path / "official", {"consolidated.safetensors": 1})
    others = checkpoint(tmp_path / "others", {"model.safetensors": 2})
    assert digest(engine_of(both), False) == digest(engine_of(both, "mistral"), False) == digest(engine_of(official), False)
    assert digest(engine_of(both, "hf"), False) != digest(engine_of(others), False), "both files, of one tensor"
    (both / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model.safetensors"}}')
    assert digest(engine_of(both, "hf"), False) == digest(engine_of(others), False) != digest(engine_of(both), False)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_weights_from_elsewhere_are_refused(tmp_path, kind):
    with pytest.raises(UnsupportedEngine, match=f"load_format is {kind}, whose weights cannot be compared"):
        digest(engine_of(checkpoint(tmp_path, FILES), kind), False)


def test_the_configuration_that_the_engine_runs_counts(tmp_path):
    folder = checkpoint(tmp_path / "a", {"consolidated.safetensors": 1})
    found = [digest(engine_of(folder), False)]
    for theta in (1e4, 1e6):  # what vLLM reads in a folder of Mistral's
        (folder / "params.json").write_text(json.dumps({"rope_theta": theta}))
        found.append(digest(engine_of(folder), False))
    assert digest(engine_of(folder, config_format="hf"), False) == found[0]
    small = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    for theta in (1e4, 1e6):  # of another folder
        config = SimpleNamespace(to_dict=lambda theta=theta: {**small, "rope_theta": theta})
        engine = engine_of(folder, hf_config_path="elsewhere", hf_config=config)
        found.append(digest(engine, False))
        assert geometry(engine).layers == 2
    assert len(set(found)) == len(found) == 5


def test_a_hubs_name_is_looked_for_where_vllm_downloads_it(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **about: found.append(about["cache_dir"]) or str(tmp_path))
    assert on_this_host("someone/model", None, "/downloads") == tmp_path
    assert found == ["/downloads"]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert on_this_host("someone/model") is None, "another hub's model of this name may be another"
    assert on_this_host(str(tmp_path)) == tmp_path
