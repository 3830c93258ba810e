"""Test your own callbacks, schedulers and backends: an engine without a model and without a thread.

    from batch_manager.testing import EngineHarness, ScriptedBackend

Owns     a backend that generates from a hash or a script, a manual clock, an engine that a test steps
Not      serving requests; the rest of the package does not import this folder
Yours    inject a fault into a step with a hook of ScriptedBackend

Neither a checkpoint nor torch is needed, unless a test reads `NamedTensor.tensor`.
"""

from .engine_harness import EngineHarness, ManualClock
from .scripted_backend import ScriptedBackend
from .scripted_tokens import expected_samples

__all__ = ["EngineHarness", "ManualClock", "ScriptedBackend", "expected_samples"]
