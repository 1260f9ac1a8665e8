"""What can be wrong with a connector's configuration or with a request's parameters."""

from __future__ import annotations

from bridge.errors import KVBridgeError


def traceback_of(error: BaseException) -> BaseException | None:
    """What a log line about `error` shows below it: a typed failure's sentence says all, unless something else caused it."""
    return error if error.__cause__ is not None or not isinstance(error, KVBridgeError) else None


class ConnectorError(KVBridgeError):
    """The connector cannot work in this engine, or cannot serve this request."""

    clause = "connector"


class BadConfiguration(ConnectorError):
    """kv_connector_extra_config has an unknown key, a missing one, or a value that cannot be."""

    clause = "bad_configuration"
    remedy = "correct kv_connector_extra_config; docs/vllm.md lists its keys"


class UnsupportedEngine(ConnectorError):
    """This engine, its version or its settings are not supported; the sentence names what."""

    clause = "unsupported_engine"


class BadParameters(ConnectorError):
    """A request's kv_transfer_params are malformed. They come through routers and clients, and only this request fails."""

    clause = "bad_parameters"
    remedy = "send do_remote_decode true to the prefiller, and to the decoder the kv_transfer_params that it answered, unchanged"


class AdapterUnknown(ConnectorError):
    """A request's LoRA adapter cannot be compared with the other engine's: its files are not here, unreadable, or others by now."""

    clause = "adapter_unknown"
    remedy = "give vLLM the adapter's own folder, with adapter_config.json and adapter_model.safetensors"


class CannotLoad(ConnectorError):
    """What the scheduler's side found wrong with a request, raised where it was to be loaded, under the clause that it had there."""

    clause = "cannot_load"

    def __init__(self, clause: str, detail: str, advice: str) -> None:
        super().__init__(detail, remedy=advice)
        self.clause = clause  # type: ignore[misc]
