"""For tests of your own callbacks, schedulers and backends: an engine without a model and without a thread.

    from batch_manager.testing import EngineHarness, ScriptedBackend

Owns     a backend that generates from a hash or a script, a clock that stands still, an engine turned by hand
Not      anything that serves requests: nothing of the package imports this folder
Yours    a fault to plant in a step is a hook of ScriptedBackend

Neither torch nor a checkpoint is needed until a response's tensor is read.
"""

from .engine_harness import EngineHarness, ManualClock
from .scripted_backend import ScriptedBackend, expected_draws

__all__ = ["EngineHarness", "ManualClock", "ScriptedBackend", "expected_draws"]
