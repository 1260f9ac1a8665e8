"""The host code that every torch accelerator shares: pages, payloads and launches of the kernels in backends/kernels."""
