"""Replacements for parts of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..kv_events import KvEvent
from ..seams import Clock, ModelBackend


@dataclass(frozen=True, slots=True)
class Parts:
    """Replacements for parts of the engine. A replacement is an object or a factory, never a name.

    scheduler   a RequestScheduler, a CapacityScheduler or a MicroBatchScheduler; or its class if the class takes no
                arguments; or a factory (limits: Limits, kv_cache_manager) of a scheduler. Any object with the methods
                of one of these classes works. A CapacityScheduler is completed with the policy's micro-batch
                scheduler, and a MicroBatchScheduler with the policy's capacity scheduler
    attention   a factory (spec, kv_pool) -> attention implementation. `spec.attention` describes the attention of each
                layer, with the effective windows. With sink tokens, the factory also gets their number, as `sink=`
    backend     a ModelBackend, or a factory () -> ModelBackend; model_path is then not read
    clock       a Clock; while it raises or returns an invalid time, the system's clock continues from the last valid
                reading
    trace       called with an IterationTrace on the worker thread, after each iteration that had an active request or
                refused a request. Exceptions of `trace` are logged and dropped, like those of a callback
    after_responses   () -> None, called on the worker thread once after the last response of an iteration that sent
                responses. Responses of every kind count: new tokens, final responses (also of stopped
                requests), refusals, and the errors SHUTDOWN and ENGINE_FAILED. A host can wake its clients here
                once, instead of once per token. Exceptions are logged and dropped
    at_end      (health) -> None, called on the worker thread once, after the last response and before `shutdown`
                returns, however the worker ends. `health` is the result of `GptManager.health`, with the state
                "STOPPED", or "FAILED" if the process of an AsyncEngine died. Exceptions are logged and dropped
    block_store a stores.BlockStore, which keeps reusable blocks for later runs and other engines, in place of
                KvCacheConfig.disk_cache_path. Needs enable_block_reuse and host_cache_size. Called on threads of the
                engine; its exceptions are logged and counted, and what it lacks is computed
    drafter     a Drafter, with SpeculativeConfig("custom")
    kv_events   (events: Sequence[KvEvent]) -> None, called on the worker thread after an iteration that changed what
                the prefix cache can find. Events are made when they are read first, so another thread should read them.
                Needs enable_block_reuse. Exceptions are logged and dropped
    logits_post_processor_batched   called once per step with the logits of all requests whose logits_post_processor is
                "batched": (request_ids, logits [n, 1, beams, vocab], token_ids) -> None. Changes the logits in place;
                see decoding/logits_post_processors.py
    stages      custom changes of logits: a sequence of LogitsStages, or a factory (num_slots, device) of a sequence.
                They run after the package's biases, penalties and bans; see decoding/stages.py. After an exception, the
                engine bisects the step, and the requests that fail alone end with an error
    """

    scheduler: Any = None
    attention: Callable[..., Any] | None = None
    backend: ModelBackend | Callable[[], ModelBackend] | None = None
    clock: Clock | None = None
    trace: Callable[..., None] | None = None
    after_responses: Callable[[], None] | None = None
    at_end: Callable[[dict[str, Any]], None] | None = None
    kv_events: Callable[[Sequence[KvEvent]], None] | None = None
    block_store: Any = None
    drafter: Any = None
    logits_post_processor_batched: Callable[..., None] | None = None
    stages: Sequence[Any] | Callable[..., Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if self.stages is not None and not callable(self.stages) and not isinstance(self.stages, list | tuple):
            raise ConfigError(f"Parts.stages is of type {type(self.stages).__name__}",
                              "expected a list or tuple of LogitsStages, a function (num_slots, device) that returns "
                              "one, or None",
                              "put the stages into a list, or leave it None")
        for name, takes in (("attention", "spec, kv_pool"), ("trace", "iteration_trace"), ("after_responses", ""),
                            ("at_end", "health"), ("kv_events", "events"),
                            ("logits_post_processor_batched", "request_ids, logits, token_ids")):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise ConfigError(f"Parts.{name} is of type {type(part).__name__}",
                                  f"expected a callable with {f'the arguments ({takes})' if takes else 'no arguments'}"
                                  ", or None",
                                  "pass a function, or leave it None")
        for name, protocol, methods in (("block_store", "BlockStore", ("count", "load", "save", "figures", "close")),
                                        ("drafter", "Drafter", ("propose",)),
                                        ("clock", "Clock", ("monotonic", "timestamp"))):
            part = getattr(self, name)
            if part is not None and (isinstance(part, type)
                                     or not all(callable(getattr(part, method, None)) for method in methods)):
                raise ConfigError(f"Parts.{name} is of type {type(part).__name__}",
                                  f"expected an object with the methods of batch_manager.{protocol} "
                                  f"({', '.join(methods)}), or None", "give it these methods, or leave it None")
        if self.backend is not None and not callable(self.backend) and not hasattr(self.backend, "start"):
            raise ConfigError(f"Parts.backend is of type {type(self.backend).__name__}",
                              "expected a ModelBackend, a function without arguments that returns one, or None",
                              "give it the methods of batch_manager.ModelBackend, or leave it None")
