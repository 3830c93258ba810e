"""`python -m batch_manager.tools.draw`: what `batch-manager draw` does."""

from ..__main__ import run_as

raise SystemExit(run_as("draw"))
