"""TransferTimeout: memory that a read may still write into is not given back."""

from __future__ import annotations

import pytest

from bridge.transfer.errors import TransferTimeout
from tests.transfer.serving import Serving, poisoned
from tests.transfer.test_release import SIZE, start_and_suspend, until_released


def test_a_registration_under_an_unfinished_read(make, kind):
    agent = make(in_flight_bytes=4 << 20)
    with Serving(SIZE, kind=kind) as serving:
        target, _, transfer = start_and_suspend(agent, serving, poisoned(SIZE))
        with pytest.raises(TransferTimeout):
            target.release()
        assert agent.registered_bytes() == SIZE
        serving.resume()
        until_released(transfer)
        target.release()
        assert agent.registered_bytes() == 0
