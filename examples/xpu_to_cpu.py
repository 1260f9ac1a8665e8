"""An Intel GPU prefills, a CPU decodes: two processes, random KV instead of a model.

The output says whether a real or an emulated card ran. Payloads are staged in host memory, which is what the two have in common.

python examples/xpu_to_cpu.py [codec]        (default: turboquant_4bit_nc)
"""

import sys

from device_pair import example

sys.exit(example(__doc__, "xpu", "cpu", staging="host"))
