"""The pair of ends that tests/handoff has."""

from tests.handoff.conftest import pair, source, target  # noqa: F401
