"""Run replicas of an engine under Ray Serve. If a replica dies, its streams continue on another replica.

    serve run examples.ray_app:app [model=FOLDER] [replicas=2] [max_replicas=2] [num_threads=1] [max_batch_size=32]
        [tensor_parallel_size=1]

    curl -N localhost:8000 -d '{"input_ids": [5, 6, 7], "request_output_len": 64, "end_id": 1}'

A request is a JSON object of request tensors. The answer has one line of JSON per delta: `tokens` and `finish_reason`,
or `error`. With `return_perf_metrics`, the last one has `cached_tokens`.

With a tensor_parallel_size of N, each replica is rank 0 of an engine of N processes on one machine. Its other ranks are
actors in the placement group of the replica, and end with it.
"""

import asyncio
import json
import os
import random
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from batch_manager import (
    FinishReason,
    InferenceRequest,
    InvalidRequestError,
    KvCacheConfig,
    ParallelConfig,
    Parts,
    TrtGptModelOptionalParams,
    resume,
)
from batch_manager.aio import AsyncEngine, RequestFailed
from batch_manager.extras.launch import follow
from batch_manager.extras.repeated_names import unique_names
from examples.prefix_routing import BLOCK_TOKENS, CachedBlocks

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_TO_FIND_A_REPLICA = 60.0
CPUS = 0.25    # of a process, as Ray counts them
# Every Ray process must be able to import this module.
EVERYWHERE = {"runtime_env": {"env_vars": {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}}}


def with_rank(params: TrtGptModelOptionalParams, rank: int) -> TrtGptModelOptionalParams:
    return replace(params, parallel_config=replace(params.parallel_config, rank=rank))


def continuation(tensors: dict, tokens: list[int]) -> dict:
    """Return the tensors of a request that continues the request `tensors` after its output `tokens`, on any replica.

    Raises InvalidRequestError if the request cannot be resumed.
    """
    return resume(InferenceRequest(0, tensors), tokens).input_tensors


@ray.remote(num_cpus=CPUS, max_restarts=0)
class Rank:
    """Another rank than 0 of a replica's engine."""

    def follow(self, model: str, params: TrtGptModelOptionalParams, rank: int) -> int:
        return follow(model, with_rank(params, rank))


class Engine:
    """One replica: an AsyncEngine with the methods that Ray calls."""

    async def __init__(self, model: str, num_threads: int, max_batch_size: int, tensor_parallel_size: int,
                       event_hash_key: str) -> None:
        self._latest: dict = {}
        self._cached, loop = CachedBlocks(), asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            leader = f"127.0.0.1:{free.getsockname()[1]}"
        params = TrtGptModelOptionalParams(
            num_threads=num_threads, max_batch_size=max_batch_size, flush_stats_when_idle=True,
            kv_cache_config=KvCacheConfig(enable_block_reuse=True, tokens_per_block=BLOCK_TOKENS,
                                          event_hash_key=bytes.fromhex(event_hash_key)),
            parallel_config=ParallelConfig(tensor_parallel_size=tensor_parallel_size, leader=leader))
        self._others = [Rank.remote() for _ in range(1, tensor_parallel_size)]     # end with the replica
        for rank, other in enumerate(self._others, 1):
            other.follow.remote(model, params, rank)
        self._engine = await AsyncEngine.start(
            model, return_batch_manager_stats_cb=lambda record: self._latest.update(json.loads(record)),
            optional_params=with_rank(params, 0),
            parts=Parts(kv_events=lambda events: loop.call_soon_threadsafe(self._cached.take, events)))

    async def stream(self, tensors: dict):
        """Yield the deltas of a request as dictionaries. Cancelling the call stops the request."""
        try:
            async for delta in self._engine.stream(tensors):
                cached = {} if delta.metrics is None else {"cached_tokens": delta.metrics.cached_tokens}
                yield {"tokens": delta.tokens, "finish_reason": delta.finish_reason.name, **cached}
        except RequestFailed as error:
            yield {"tokens": [], "error": str(error), "is_retryable": error.is_retryable}

    async def health(self, tensors: dict) -> dict:
        """Return the health of this replica.

        The router chooses the replica by the prompt in `tensors`, as for `stream`. The replica ignores `tensors`.
        """
        return self._engine.health()

    def check_health(self) -> None:
        """Raise if the engine is not healthy. Ray then replaces the replica."""
        health = self._engine.health()
        if health["state"] != "RUNNING" or health["is_hanging"]:
            raise RuntimeError(f"the state of the engine is {health['state']}, is_hanging is {health['is_hanging']}, "
                               f"the activity is {health['activity']!r}, and the failure is {health['failure']!r}; "
                               "expected the state RUNNING, and is_hanging False")

    async def record_routing_stats(self) -> dict[str, Any]:
        latest = self._latest
        return {"free_share": latest.get("Free KV cache blocks", 1) / latest.get("Max KV cache blocks", 1),
                "active": self._engine.health()["active_requests"], "max_active": self._engine.info.max_batch_size,
                "cached": self._cached.packed()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        health = self._engine.health()
        return {"waiting": health["queued_requests"], "active": health["active_requests"],
                "max_active": self._engine.info.max_batch_size}


class Front:
    """Serves HTTP and keeps the tokens of each stream, so that another replica can continue the stream."""

    def __init__(self, engines) -> None:
        self._engines = engines

    async def __call__(self, request: Request):
        try:
            tensors = json.loads(await request.body(), object_pairs_hook=unique_names)
            if not isinstance(tensors["input_ids"], list) or type(tensors["request_output_len"]) is not int:
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            why = f": {error}" if type(error) is ValueError else ""
            return JSONResponse({"error": "the body is not a JSON object with input_ids, a list, and "
                                          f"request_output_len, an integer{why}"}, 400)
        tensors.setdefault("random_seed", random.getrandbits(63))      # the same seed on every replica
        return StreamingResponse(self._lines(tensors), media_type="application/x-ndjson")

    async def _lines(self, tensors: dict):
        async for delta in self._deltas(tensors):
            yield json.dumps(delta) + "\n"

    async def _deltas(self, tensors: dict):
        tokens: list[int] = []
        give_up = None
        while True:
            deltas = None
            try:
                deltas = self._engines.options(stream=True).stream.remote(continuation(tensors, tokens))
                async for delta in deltas:
                    if delta.pop("is_retryable", False):
                        reason = delta["error"]
                        break
                    give_up = None
                    tokens += delta["tokens"]
                    yield delta
                    if "error" in delta or delta["finish_reason"] != FinishReason.NOT_FINISHED.name:
                        return
                else:
                    reason = "the replica ended the stream early"
            except (RayActorError, DeploymentUnavailableError) as error:
                reason = f"the replica died ({type(error).__name__})"
            except InvalidRequestError as error:
                yield {"tokens": [], "error": str(error)}
                return
            finally:
                if deltas is not None:
                    deltas.cancel()                     # the client may have disconnected
            if len(tokens) >= tensors["request_output_len"]:
                yield {"tokens": [], "finish_reason": FinishReason.LENGTH.name}
                return
            give_up = give_up or time.monotonic() + SECONDS_TO_FIND_A_REPLICA
            if time.monotonic() > give_up:
                yield {"tokens": [], "error": reason}
                return
            await asyncio.sleep(0.1)


def app(arguments: dict[str, str]) -> serve.Application:
    """Build the application. `serve run` calls this function with its key=value arguments."""
    known = {"model": str(REPOSITORY / "examples" / "models" / "austen-4m"), "replicas": 2, "max_replicas": 0,
             "num_threads": 1, "max_batch_size": 32, "tensor_parallel_size": 1}
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r}; the arguments are {', '.join(known)}")
    given = known | {name: type(known[name])(value) for name, value in arguments.items()}
    given["max_replicas"] = max(given["max_replicas"], given["replicas"])
    autoscaling = AutoscalingConfig(
        min_replicas=given["replicas"], max_replicas=given["max_replicas"], metrics_interval_s=1, upscale_delay_s=5,
        look_back_period_s=2, policy=AutoscalingPolicy(policy_function="examples.ray_router:autoscale"))
    event_hash_key = os.urandom(32).hex()      # gives a block one name in all replicas
    engines = serve.deployment(Engine, name="Engine").options(
        ray_actor_options={"num_cpus": CPUS, **EVERYWHERE}, max_ongoing_requests=1000,
        placement_group_bundles=[{"CPU": CPUS}] * given["tensor_parallel_size"],     # the replica, then its ranks
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=1, health_check_timeout_s=10, graceful_shutdown_timeout_s=30,
        request_router_config=RequestRouterConfig(request_router_class="examples.ray_router:PrefixRouter",
                                                  request_router_kwargs={"event_hash_key": event_hash_key},
                                                  request_routing_stats_period_s=1),
        **({"autoscaling_config": autoscaling} if given["max_replicas"] > given["replicas"]
           else {"num_replicas": given["replicas"]}))
    front = serve.deployment(Front, name="Front").options(
        ray_actor_options={"num_cpus": CPUS, **EVERYWHERE}, max_ongoing_requests=1000)
    return front.bind(engines.bind(given["model"], given["num_threads"], given["max_batch_size"],
                                   given["tensor_parallel_size"], event_hash_key))
