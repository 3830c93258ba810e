"""The Ray example, without a Ray cluster, asks for the right number of replicas and handles requests as it should.

python tests/campaigns/ray_replicas.py runs replicas and kills one of them.
"""

import asyncio
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

if find_spec("ray") is None:
    pytest.skip('Ray Serve was NOT tested: ray is not installed; pip install "ray[serve]"', allow_module_level=True)
pytest.importorskip("torch")

from batch_manager import InvalidRequestError, kv_block_hashes  # noqa: E402
from batch_manager.aio import AsyncEngine  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"


def module(name):
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    return importlib.import_module(f"examples.{name}")


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


def test_the_router_asks_for_the_blocks_of_the_prompt():
    router_module = module("ray_router")
    router = router_module.PrefixRouter.__new__(router_module.PrefixRouter)
    router.initialize_state(b"key".hex())

    def replica(name, cached=()):
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={"cached": b"".join(
            each.to_bytes(8, "little") for each in cached)})

    ids = list(range(200))
    for extra in ({}, {"input_token_extra_ids": ids}):
        hashes = kv_block_hashes(ids, 64, event_hash_key=b"key", token_extra_ids=extra.get("input_token_extra_ids"))
        replicas = [replica("a"), replica("b", hashes[:2]), replica("c", hashes[:1])]
        order = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[{"input_ids": ids, **extra}])))
        assert [each.replica_id.unique_id for (each,) in order] == ["b", "c", "a"]
    for arguments in ([], [{"input_ids": "text"}], [{"input_ids": [2**70] * 64}], [{"input_ids": None}], [5]):
        assert len(asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=arguments)))) == 3
