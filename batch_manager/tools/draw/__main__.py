"""`python -m batch_manager.tools.draw`: what `batch-manager draw` does."""

import sys

from ..__main__ import main

raise SystemExit(main(["draw", *sys.argv[1:]]))
