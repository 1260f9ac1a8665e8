"""`python -m bridge` is the command `kvbridge`."""

import sys

from bridge.cli.main import kvbridge

sys.exit(kvbridge())
