"""Other transfer agents than NIXL, between real engines. The stream agent needs nothing but kvbridge; ucxx is not in vLLM's environment."""

import pytest

from tests.vllm.models import prompt
from tests.vllm.rig import largest_difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.boots, pytest.mark.timeout(600)]


def test_stream(rig):
    pair = rig.pair({"extra": {"agent": "stream"}}, {"extra": {"agent": "stream"}})
    for length in (1, 300, 900):
        tokens = prompt(length, seed=300 + length)
        handed_off, local = pair.handed_off(tokens), pair.local(tokens)
        assert handed_off.tokens == local.tokens
        assert largest_difference(handed_off, local) < 1e-4
    pair.assert_empty()


def test_both_ends_must_have_the_same_agent(rig):
    pair = rig.pair(None, {"extra": {"agent": "stream"}})
    tokens = prompt(300, seed=310)
    assert pair.decoder.generate(tokens, 4, pair.prefill(tokens).params).reason == "error"
    assert pair.local(tokens, 4).reason == "length"
    pair.decoder.assert_empty()
