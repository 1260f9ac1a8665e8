"""What of a model decides the shape and the identity of its KV, read from its configuration and weights."""

from bridge.model.config_fields import BadConfig, BadWeights, GeometryError, UnsupportedModel
from bridge.model.digest import adapter_digest, adapter_files, model_digest
from bridge.model.geometry import ModelGeometry
from bridge.model.layer_groups import LayerGroup, OpaqueBytes
from bridge.model.request import SharedLayer, manifest_for

__all__ = [
    "BadConfig",
    "BadWeights",
    "GeometryError",
    "LayerGroup",
    "ModelGeometry",
    "OpaqueBytes",
    "SharedLayer",
    "UnsupportedModel",
    "adapter_digest",
    "adapter_files",
    "manifest_for",
    "model_digest",
]
