"""An Intel GPU prefills, another decodes: two processes, random KV instead of a model.

The output says whether a real or an emulated card ran.

python examples/xpu_to_xpu.py [codec] [auto|device|host]        (default: turboquant_4bit_nc auto)
"""

import sys

from device_pair import example

sys.exit(example(__doc__, "xpu", "xpu"))
