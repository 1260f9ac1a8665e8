"""An NVIDIA GPU prefills, another decodes: two processes, random KV instead of a model. With one GPU, both processes use it.

python examples/cuda_to_cuda.py [codec] [auto|device|host]        (default: turboquant_4bit_nc auto)

The payload is staged in the GPUs' own memory where NIXL can register it, else in pinned host memory.
"""

import sys

import torch
from device_pair import example

sys.exit(example(__doc__, "cuda", f"cuda:{max(torch.cuda.device_count(), 1) - 1}"))
