"""An NVIDIA GPU prefills, an Intel GPU decodes: two processes, random KV instead of a model.

The output says whether a real or an emulated card ran.

python examples/cuda_to_xpu.py [codec]        (default: turboquant_4bit_nc)
"""

import sys

from device_pair import run

sys.exit(run("cuda", "xpu", *sys.argv[1:2]))
