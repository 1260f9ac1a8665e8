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
from bridge.vllm.content import Adapters, content_of
from bridge.vllm.engine import QUANTIZATION_FILES, digest, hashes_images
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
    assert adapters.of(lora(folder)) == adapter_digest(folder), "nothing of it was kept"


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
