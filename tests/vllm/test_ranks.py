"""Engines with two TP ranks: vLLM's multiprocess executor, one control channel and one payload a rank."""

import pytest

from tests.vllm.models import prompt
from tests.vllm.rig import largest_difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.boots, pytest.mark.timeout(900)]

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize(("prefiller", "decoder"), [(TWO, None), (TWO, TWO), (None, TWO)], ids=["2 to 1", "2 to 2", "1 to 2"])
def test_hand_off(rig, prefiller, decoder):
    pair = rig.pair(prefiller, decoder)
    for length in (1, 100, 300, 900):
        tokens = prompt(length, seed=100 + length)
        handed_off, local = pair.handed_off(tokens), pair.local(tokens)
        assert handed_off.tokens == local.tokens
        assert largest_difference(handed_off, local) < 1e-4
    pair.assert_empty()
    # One of the decoder's, then one of the prefiller's ranks fails; the others end too, and each id is reported once.
    tokens = prompt(900, seed=110)
    for side, what in ((pair.decoder, "land"), (pair.prefiller, "pack")):
        ranks = side.settings.get("tensor_parallel_size", 1)
        side.rpc("break", what, ranks - 1)
        params = pair.prefill(tokens).params
        assert pair.decoder.generate(tokens, 4, params).reason == "error"
        side.rpc("calm")
        pair.assert_empty()
    handed_off, local = pair.handed_off(tokens, 8), pair.local(tokens, 8)
    assert handed_off.tokens == local.tokens
    params = pair.prefill(tokens).params
    wrong = {**params, "kvbridge": {**params["kvbridge"], "tp_size": 3 - params["kvbridge"]["tp_size"]}}
    assert pair.decoder.generate(tokens, 4, wrong).reason == "error"
    pair.decoder.assert_empty()
