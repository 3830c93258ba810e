"""What an engine of several ranks refuses in its constructor, before anything is loaded."""

import pytest

from batch_manager import ConfigError, ParallelConfig
from batch_manager.testing import ScriptedBackend


def test_several_ranks_are_not_built_yet(make_manager, new_client):
    with pytest.raises(ConfigError, match="parallel_config has 6 ranks; several ranks are not built yet; leave"):
        make_manager(new_client(), backend=ScriptedBackend(), parallel_config=ParallelConfig(
            tensor_parallel_size=2, pipeline_parallel_size=3, rank=0, leader="127.0.0.1:1"))
