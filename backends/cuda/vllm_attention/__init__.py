"""vLLM 0.32's TurboQuant attention back end with `attend` for decode tokens, in vLLM's slots or in planes (docs/attend.md)."""
