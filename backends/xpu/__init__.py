"""Intel GPUs: the device on torch.xpu, and the emulated one, whose kernels Intel's compiler builds and Intel's CPU runtime runs.

`environment.py` makes the second Python environment that the emulation needs, since Intel's Triton has the import name of the other.
`opencl.py`, `opencl_driver.py` and `worker.py` run there, everything else runs in the project's own.
"""
