"""The Ray example, without a Ray cluster, ranks replicas in the right order and handles requests as it should.

python tests/campaigns/ray_replicas.py runs replicas and kills one of them.
"""

import asyncio
import importlib
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip('Ray Serve was NOT tested: ray is not installed; pip install "ray[serve]"', allow_module_level=True)
pytest.importorskip("torch")

from batch_manager import InvalidRequestError  # noqa: E402
from batch_manager.aio import AsyncEngine  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"


def module(name):
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module(f"examples.{name}")


def test_prompts_that_begin_alike_go_to_one_replica_and_others_are_spread():
    ranked, replicas = module("ray_router").ranked, {"a": {}, "b": {}, "c": {}}
    for number in range(20):
        prefix = [number] * 64
        assert len({ranked(replicas, prefix + [tail])[0] for tail in range(5)}) == 1
    assert min(Counter(ranked(replicas, [number] * 64)[0] for number in range(300)).values()) > 60


def test_a_replica_whose_blocks_run_out_comes_last():
    ranked = module("ray_router").ranked
    for number in range(20):
        order = ranked({"a": {"free_share": 0.05}, "b": {"free_share": 0.5}, "c": {}}, [number])
        assert order[-1] == "a"


@pytest.mark.parametrize("waiting, active, expected", [(1, 32, 3), (0, 32, 2), (0, 16, 1), (0, 17, 2), (0, 0, 1)])
def test_one_more_while_requests_wait_and_one_fewer_when_there_is_room(waiting, active, expected):
    assert module("ray_router").replicas_for(2, 1, 4, waiting, active, 32) == expected


def test_never_fewer_than_the_least_nor_more_than_the_most():
    replicas_for = module("ray_router").replicas_for
    assert replicas_for(2, 2, 4, 0, 0, 32) == 2
    assert replicas_for(4, 2, 4, 9, 99, 32) == 4


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"min_length": 15},
                                  {"runtime_top_p": 0.9, "runtime_top_p_decay": 0.9}])
def test_a_continuation_generates_what_is_missing(more):
    continuation = module("ray_app").continuation
    tensors = {"input_ids": [5, 6, 7], "request_output_len": 24, "temperature": 0.9, "runtime_top_k": 40,
               "random_seed": 3, **more}

    async def both():
        async with await AsyncEngine.start(MODEL) as engine:
            whole = (await engine.generate(tensors)).tokens
            rests = [(await engine.generate(continuation(tensors, whole[:cut]))).tokens for cut in (0, 1, 10, 23)]
            return whole, rests

    whole, rests = asyncio.run(both())
    assert rests == [whole[cut:] for cut in (0, 1, 10, 23)]


def test_what_has_a_state_beside_its_tokens_is_refused():
    ray_app = module("ray_app")
    for tensors in ({"beam_width": 2},
                    {"runtime_top_p_decay": 0.9, "runtime_top_p": 0.9, "runtime_top_p_reset_ids": 3}):
        with pytest.raises(InvalidRequestError, match=next(iter(tensors))):
            ray_app.continuation({"input_ids": [1], "request_output_len": 4, **tensors}, [2])


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="unknown argument 'replica'"):
        module("ray_app").app({"replica": "2"})
