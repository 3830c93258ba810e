"""Engines of the tests, with a scripted or a real model: a loop without a thread, or a manager with a thread.

`make_loop` and `make_manager` build them. A `World` is a loop with its client, clock and model.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from batch_manager import (
    GptManager,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.arguments import Callbacks, EngineArguments
from batch_manager.build_rank import build_rank
from batch_manager.kv.audit import audit
from batch_manager.loop.generation_loop import GenerationLoop
from batch_manager.testing.scripted_backend import ScriptedBackend

from .client import Client
from .clock import VirtualClock

MAX_BATCH_SIZE = 8


def scripted(backend: Any = None) -> Any:
    """Return a ScriptedBackend if `backend` is a dictionary of its options or None, otherwise `backend` itself."""
    return ScriptedBackend(**(backend or {})) if backend is None or isinstance(backend, dict) else backend


def engine_arguments(params: TrtGptModelOptionalParams | None = None,
            policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION,
            model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching, max_beam_width: int = 1,
            terminate_req_id: int | None = None, max_draft_tokens: int = 0, exclude_input: bool = False,
            **options: Any) -> dict[str, Any]:
    """Return fields of EngineArguments."""
    if params is None:
        kv = options.pop("kv_cache_config", None) or KvCacheConfig()
        params = TrtGptModelOptionalParams(kv_cache_config=kv, **{"max_batch_size": MAX_BATCH_SIZE, **options})
    elif options:
        raise TypeError(f"{sorted(options)} are given beside params; expected one of both")
    return {"model_type": model_type, "max_beam_width": max_beam_width, "scheduler_policy": policy,
            "optional_params": params, "terminate_req_id": terminate_req_id, "max_draft_tokens": max_draft_tokens,
            "exclude_input_in_output": exclude_input}


def make_loop(client: Client, *, model_path: Any = None, backend: Any = None, clock: Any = None, parts: Any = None,
              params: TrtGptModelOptionalParams | None = None, heartbeat: Any = None,
              as_arrays: bool = False, **options: Any) -> GenerationLoop:
    """Return a loop without a thread.

    backend     a backend, or the options of a scripted one; ignored if `model_path` is set
    clock       the clock; None: a VirtualClock
    parts       fields of `Parts` other than the backend and the clock
    params      TrtGptModelOptionalParams; None: they are made of `options`
    as_arrays   whether responses contain numpy arrays, so that torch is not imported
    options     policy, model_type, max_beam_width, terminate_req_id, max_draft_tokens, exclude_input;
                others: fields of TrtGptModelOptionalParams
    """
    parts = {"clock": VirtualClock() if clock is None else clock, **(parts or {})}
    if model_path is None:
        parts = {"backend": scripted(backend), **parts}
    loop = build_rank(EngineArguments(model_path=model_path, **engine_arguments(params, **options)),
                      Callbacks(**client.callbacks()), Parts(**parts), heartbeat)
    if as_arrays:
        loop.deliveries._to_tensor = None
    return loop


def make_manager(client: Client, *, model_path: Any = None, backend: Any = None, parts: Any = None,
                 params: TrtGptModelOptionalParams | None = None, as_arrays: bool = False,
                 manager_options: dict[str, Any] | None = None, **options: Any) -> GptManager:
    """Return a manager with a running worker. It has the real clock unless `parts` has another one.

    manager_options   further arguments of GptManager
    Other arguments are those of `make_loop`.
    """
    if model_path is None:
        parts = {**(parts or {}), "backend": scripted(backend)}
    manager = GptManager(model_path, **engine_arguments(params, **options) | client.callbacks()
                         | {"parts": Parts(**(parts or {}))} | (manager_options or {}))
    if as_arrays:
        manager._loop.deliveries._to_tensor = None
    return manager


@dataclass
class World:
    """A loop without a thread, with its client, clock and model."""

    loop: GenerationLoop
    client: Client
    clock: VirtualClock
    backend: Any

    def step(self, times: int = 1, *, accept_new: bool = True) -> bool:
        """Run iterations, and audit the pool after each. Returns whether the last iteration had work to do."""
        busy = False
        for _ in range(times):
            busy = self.loop.step(accept_new=accept_new)
            audit(self.loop.kv)
        return busy

    def run(self, limit: int = 10_000) -> None:
        """Run iterations until no request is live, at most `limit`.

        Then assert that no request holds a block, and that no callback broke a rule.
        """
        for _ in range(limit):
            if not self.step() and self.loop.is_empty and not self.client.pending:
                break
        else:
            raise AssertionError(f"still busy after {limit} iterations")
        assert self.loop.kv.used_blocks == 0
        assert not self.client.complaints, self.client.complaints

    def expected(self, prompt: list[int], count: int, **options: Any) -> list[int]:
        """Return the first `count` tokens that the scripted model generates after `prompt`."""
        return self.backend.expected(prompt, count, **options)


def build_world(*, client: Client | None = None, clock: VirtualClock | None = None, **options: Any) -> World:
    """Return a world. `options` are those of `make_loop`."""
    client = Client() if client is None else client
    clock = VirtualClock() if clock is None else clock
    loop = make_loop(client, clock=clock, **options)
    return World(loop, client, clock, loop.backend)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Turn the package's log off. Tests that inject thousands of faults use this context."""
    log = logging.getLogger("batch_manager")
    was_disabled, log.disabled = log.disabled, True    # `setLevel` would clear the caches of all loggers of the process
    try:
        yield
    finally:
        log.disabled = was_disabled
