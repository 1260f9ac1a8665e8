"""An Intel GPU prefills, an NVIDIA GPU decodes: two processes, random KV instead of a model.

The output says whether a real or an emulated card ran.

python examples/xpu_to_cuda.py [codec]        (default: turboquant_4bit_nc)
"""

import sys

from device_pair import run

sys.exit(run("xpu", "cuda", *sys.argv[1:2]))
