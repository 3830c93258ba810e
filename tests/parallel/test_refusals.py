"""C27: what an engine of several ranks refuses in its constructor, before anything is loaded."""

import asyncio

import pytest

from batch_manager import (
    ConfigError,
    GptManager,
    ParallelConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.aio import AsyncEngine
from batch_manager.testing.scripted_backend import ScriptedBackend

PLACE = {"rank": 0, "leader": "127.0.0.1:1"}


def start(options, parts, config, model_type=TrtGptModelType.InflightFusedBatching):
    params = TrtGptModelOptionalParams(parallel_config=ParallelConfig(**PLACE, **config), **options)
    GptManager("/nowhere", model_type, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, lambda most: [], lambda *given: None,
               optional_params=params, parts=Parts(**parts))


@pytest.mark.parametrize("options, parts, says, way_out", [
    ({"cuda_graphs": True}, {}, "cuda_graphs is True", "leave cuda_graphs out"),
    ({"quantization": "int8"}, {}, "quantization is set", "leave quantization out"),
    ({"quantized_activations": "int8"}, {}, "quantized_activations is set", "leave quantized_activations out"),
    ({"model_implementation": "transformers"}, {}, "model_implementation is 'transformers'",
     "leave model_implementation out"),
    ({}, {"backend": ScriptedBackend}, "Parts.backend is set", "leave Parts.backend or parallel_config out"),
    ({}, {"attention": lambda spec, kv_pool: None}, "Parts.attention is set",
     "leave Parts.attention or parallel_config out"),
    ({"run_ahead": True}, {}, "run_ahead is True", "leave run_ahead out"),
    ({"device": "cuda:1"}, {}, "device is 'cuda:1'", "device_ids="),
])
def test_an_option_of_one_process_is_refused_before_the_model_is_looked_for(options, parts, says, way_out):
    with pytest.raises(ConfigError) as raised:
        start(options, parts, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    error = raised.value
    assert error.fact == f"{says}, and parallel_config has 6 ranks" and error.expectation and way_out in str(error)


def test_static_batches_and_nccl_without_gpus_are_refused():
    with pytest.raises(ConfigError, match="V1 is set, and parallel_config has 2 ranks; .*; use InflightFusedBatching"):
        start({}, {}, {"tensor_parallel_size": 2}, TrtGptModelType.V1)
    with pytest.raises(ConfigError, match="collectives is 'nccl', and .* 2 ranks; NCCL joins GPUs; leave collectives"):
        start({"device": "cpu"}, {}, {"tensor_parallel_size": 2, "collectives": "nccl"})


def test_the_launcher_makes_the_processes():
    params = TrtGptModelOptionalParams(parallel_config=ParallelConfig(tensor_parallel_size=2, **PLACE))
    with pytest.raises(ConfigError, match="process is True, and parallel_config has 2 ranks; .*; leave process out"):
        asyncio.run(AsyncEngine.start("/nowhere", optional_params=params, process=True))


def test_one_rank_is_as_without(make_manager, new_client):
    make_manager(new_client(), backend=ScriptedBackend(), parallel_config=ParallelConfig(collectives="nccl"))
