"""`python -m batch_manager.tools.draw`: the same as `batch-manager draw`."""

from ..__main__ import run_as

raise SystemExit(run_as("draw"))
