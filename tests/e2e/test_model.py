"""The real language model: its cache, taken out, put into pages and put back, goes on as if nothing had happened."""

import pytest
import torch

from bridge.demo import model as demo_model
from bridge.demo import text
from bridge.demo.errors import BadPrompt
from bridge.demo.model import load_model
from bridge.demo.paged import from_pages, through_codec, to_pages
from bridge.pages import BlockTable
from bridge.wire import Element

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
COUNT = 12


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenise(text.default_prompt())[:150]


@pytest.fixture(scope="module")
def prefilled(model, tokens):
    return model.prefill(tokens)


def test_shapes(model, tokens, prefilled):
    g = model.geometry
    assert (g.layers, g.kv_heads, g.head_dim, g.query_heads) == (30, 3, 64, 9)
    assert len(model.digest) == 32
    assert len(prefilled.layers) == 30
    assert all(side.shape == (3, len(tokens), 64) and side.dtype is torch.float32 for pair in prefilled.layers for side in pair)
    assert prefilled.logits.shape == (model.vocabulary,)


def test_decoding_from_the_cache_equals_computing_all_anew(model, tokens, prefilled):
    decoded = model.decode(prefilled.layers, prefilled.first_token, COUNT, logits=True)
    assert len(decoded.tokens) == COUNT
    longer = [*tokens, prefilled.first_token, *decoded.tokens]
    for i in (0, COUNT - 1):
        anew = model.prefill(longer[: len(tokens) + 1 + i])
        assert anew.first_token == decoded.tokens[i]
        torch.testing.assert_close(anew.logits, decoded.logits[i], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("block_size", "layout"), [(16, "NHD"), (8, "HND"), (64, "HND")])
def test_bf16_pages_decode_as_a_contiguous_bf16_cache(model, tokens, prefilled, block_size, layout):
    plain = [(key.bfloat16().float(), value.bfloat16().float()) for key, value in prefilled.layers]
    expected = model.decode(plain, prefilled.first_token, COUNT, logits=True)
    cache, table = to_pages(prefilled.layers, block_size=block_size, layout=layout, element=Element.BF16)
    got = model.decode(from_pages(cache, table, len(tokens)), prefilled.first_token, COUNT, logits=True)
    assert got.tokens == expected.tokens
    assert torch.equal(got.logits, expected.logits)


def test_a_wrong_page_changes_the_result(model, tokens, prefilled):
    """What the equalities above would not show if decoding ignored the cache."""
    cache, table = to_pages(prefilled.layers, block_size=16)
    right = model.decode(from_pages(cache, table, len(tokens)), prefilled.first_token, 1, logits=True)
    # Exchanging two pages would change nothing: positions are rotated into the keys, and attention sums over them in any order.
    pages = list(table.pages)
    pages[2] = pages[5]
    wrong = model.decode(from_pages(cache, BlockTable(pages, 16), len(tokens)), prefilled.first_token, 1, logits=True)
    assert (right.logits - wrong.logits).abs().max() > 0.01


def test_the_given_cache_is_not_changed(model, prefilled):
    before = [key.clone() for key, _ in prefilled.layers]
    model.decode(prefilled.layers, prefilled.first_token, 2)
    assert all(torch.equal(a, key) for a, (key, _) in zip(before, prefilled.layers, strict=True))


def test_eight_bits_leave_the_prediction_nearly_as_it_was(model, tokens, prefilled):
    cache, table = to_pages(prefilled.layers, block_size=16)
    plain = model.decode(from_pages(cache, table, len(tokens)), prefilled.first_token, 1, logits=True).logits[0]
    coded = model.decode(through_codec(cache, table, len(tokens), "fp8_e4m3"), prefilled.first_token, 1, logits=True).logits[0]
    divergence = torch.nn.functional.kl_div(coded.log_softmax(-1), plain.log_softmax(-1), reduction="sum", log_target=True)
    assert 0 < float(divergence) < 0.05


def test_batches_equal_single_runs(model, tokens):
    batch = torch.tensor([tokens[:64], tokens[64:128]])
    together = model.prefill_batch(batch)
    logs = model.log_probabilities([(k[:, :, :32], v[:, :, :32]) for k, v in together.layers], batch[:, 32:])
    assert logs.shape == (2, 31)
    for row in (0, 1):
        alone = model.prefill(batch[row].tolist())
        torch.testing.assert_close(together.layers[29][0][row], alone.layers[29][0], rtol=1e-3, atol=1e-3)
        shorter = model.prefill(batch[row, :40].tolist())
        expected = shorter.logits.log_softmax(-1)[batch[row, 40]]
        torch.testing.assert_close(logs[row, 40 - 33], expected, rtol=1e-3, atol=1e-3)


def test_prompts(model):
    with pytest.raises(BadPrompt, match="empty"):
        model.tokenise("")
    with pytest.raises(BadPrompt, match="8192"):
        model.tokenise("word " * 9000)
    assert model.text(model.tokenise("Plain text comes back.")) == "Plain text comes back."


def test_every_passage_is_long_enough(model):
    short = {passage.name: len(model.tokenise(passage.text)) for passage in text.passages()}
    assert {name: count for name, count in short.items() if count < 400} == {}
    assert 250 <= len(model.tokenise(text.default_prompt())) <= 350


def test_the_kept_copy_has_the_same_bits(model, tokens, prefilled, tmp_path):
    """Reads the GGUF itself: the one slow test here."""
    steps = []
    first = load_model(lambda step, seconds: steps.append((step, seconds)), threads=1, folder=tmp_path)
    again = load_model(threads=1, folder=tmp_path)
    assert (first.loaded_from, again.loaded_from) == ("gguf", "cache")
    assert first.digest == again.digest == model.digest
    assert len({step for step, _ in steps}) >= 5
    assert [seconds for _, seconds in steps] == sorted(seconds for _, seconds in steps)
    for other in (first, again):
        found = other.prefill(tokens)
        assert torch.equal(found.logits, prefilled.logits)
        assert all(torch.equal(a, b) for x, y in zip(found.layers, prefilled.layers, strict=True) for a, b in zip(x, y, strict=True))
    assert sorted(entry.suffix for entry in tmp_path.iterdir() if entry.is_file()) == [".lock"]


def test_a_damaged_copy_is_dropped(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text("{")
    (copy / "model.safetensors").write_bytes(b"\xcd" * 100)
    assert demo_model._load_copy(copy, lambda step, seconds: None, 0.0) is None
    assert not copy.exists()
