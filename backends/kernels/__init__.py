"""Triton sources that every accelerator shares. They run on CUDA and XPU, and on the CPU under TRITON_INTERPRET=1.

pack.py, land.py and slots.py hold the kernels and their launch functions; plan.py says what they are given; the other modules are parts.
"""
