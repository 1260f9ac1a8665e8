"""The entry point that vLLM calls at the start of each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

import os

from backends.cuda.vllm_attention.refusals import UnsupportedAttention

SWITCH = "KVBRIDGE_ATTENTION"
CLASSES = {"slots": "SlotsBackend", "planes": "PlanesBackend"}


def register() -> None:
    """Puts this back end in the place of vLLM's TurboQuant one if KVBRIDGE_ATTENTION says so; otherwise changes nothing.

    In TurboQuant's place, and not as CUSTOM: vLLM keeps the first and last layers of most models in bf16 and gives those to another back
    end, while one that is named on the command line would get them all. Raises UnsupportedAttention for another word in the variable.
    """
    layout = os.environ.get(SWITCH, "")
    if not layout:
        return
    if layout not in CLASSES:
        raise UnsupportedAttention(f"{SWITCH} is {layout!r}", remedy=f"set it to {' or '.join(CLASSES)}, or leave it out")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.TURBOQUANT, f"backends.cuda.vllm_attention.backend.{CLASSES[layout]}")
