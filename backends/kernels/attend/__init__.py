"""Paged decode attention directly over TurboQuant pages (docs/attend.md): what every implementation shares, and the Triton kernels.

`pages` says what a page is, `arguments` what a call may be, `reference` computes it in float64, `kernels` in Triton. The calls are
`backends.accelerator.attend.attend` (Triton) and `backends.cuda.attend.attend` (CUDA C++).
"""
