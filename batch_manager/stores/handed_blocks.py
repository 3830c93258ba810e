"""Prompts that one engine computes and another continues.

When a context_only request ends, its engine copies the full blocks of the prompt to host blocks and holds them under a
ticket. The engine of the generation_only request fetches them into host blocks of its own, while the request waits. Its
claim then finds them as it finds all cached blocks. It computes the rest of the prompt, at least its last token, and so
draws the first token itself: the same one, because a draw depends on logits, seed and position only.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..config import KvTransferConfig
from ..errors import KvTransferError, RequestError, counted, type_name
from ..handover import BlockCopy
from ..kv.prefix_cache import PrefixCache
from ..requests.admission import Admitted
from ..requests.context_phase import ContextPhaseParams
from ..requests.llm_request import LlmRequest
from .held_contexts import HeldContext, HeldContexts
from .interface import BlockStore, StoredBlock
from .stored_blocks import Load, StoredBlocks, Waiting
from .threads import StoreThreads, tried

SENDS_AT_ONCE = FETCHES_AT_ONCE = 4


class Server(Protocol):
    """What listens for other engines, see parallel/block_exchange.py."""

    port: int

    def start(self, answer: Callable[..., str], submit: Callable[[Callable[[], None]], None]) -> None: ...

    def close(self) -> None: ...


class NoStore:
    """The stores.interface.BlockStore of an engine that has none."""

    def count(self, blocks: Sequence[StoredBlock]) -> int:
        return 0

    def load(self, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview]) -> int:
        return 0

    def save(self, block: StoredBlock, content: memoryview) -> None:
        return None

    def figures(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        return None


@dataclass(eq=False, slots=True, kw_only=True)
class Fetch(Load):
    """A Load from another engine. `blocks` is empty; `until` is in seconds of time.monotonic()."""

    source: ContextPhaseParams
    until: float
    reason: str = ""
    num_bytes: int = 0
    microseconds: int = 0


class HandedBlocks(StoredBlocks):
    """The traffic between a prefix cache and other engines, and with a store if there is one. The worker calls all
    methods; other arguments as for StoredBlocks.

    fetch    gets blocks from another engine; runs on a thread
    server   listens for other engines; None: this one only takes blocks
    """

    def __init__(self, store: BlockStore | None, cache: PrefixCache, config: KvTransferConfig,
                 fetch: Callable[..., tuple[int, str]], server: Server | None, *,
                 monotonic: Callable[[], float], **options: Any) -> None:
        self._has_store = store is not None
        super().__init__(NoStore() if store is None else store, cache, monotonic=monotonic, **options)
        if store is None:
            cache.ended = None
        self._config, self._fetch_from, self._server, self._held = config, fetch, server, HeldContexts()
        self._senders, self._fetchers = StoreThreads(SENDS_AT_ONCE), StoreThreads(FETCHES_AT_ONCE)
        self._figures |= dict.fromkeys(("Context Only Requests", "Generation Only Requests", "KV Transfer Bytes",
                                        "KV Transfer Microseconds", "KV Transfer Fallbacks"), 0)

    def begin(self) -> None:
        if not self._has_begun and self._server is not None:
            self._server.start(self._answer, self._senders.submit)
        super().begin()

    def figures(self) -> dict[str, int]:
        figures = super().figures() | {"Held Transfer Blocks": self._held.num_blocks}
        return {name: value for name, value in figures.items() if self._has_store or not name.startswith("Store ")}

    def clear(self) -> None:
        super().clear()
        self._lapse(float("inf"))

    def collect(self) -> None:
        super().collect()
        if self._held.num_blocks:
            self._lapse(self._monotonic())

    def close(self) -> None:
        if not self._is_closed:
            if self._server is not None:
                self._server.close()
            super().close()                            # marks it as closed, which ends waits and fetches
            self._senders.close()
            self._fetchers.close()

    # Contexts for other engines.

    def hand_over(self, request: LlmRequest) -> np.ndarray:
        """Hold the blocks of a context_only request that has ended. Returns the tensor `context_phase_params`."""
        cache, config, server = self._cache, self._config, self._server
        assert server is not None                      # admission refuses the request otherwise
        most = int(cache.host.num_blocks * config.held_blocks_fraction)
        domain, keys = cache.keys_of(request, (request.orig_prompt_len - 1) // cache.tokens_per_block)
        nodes = cache.index.walk(domain, keys)[:most]
        while self._held.num_blocks + len(nodes) > most and self._lapse(self._monotonic(), 1):
            continue
        host_ids = self._reserve(min(len(nodes), most - self._held.num_blocks), nodes)
        copies = []
        for node, host_id in zip(nodes, host_ids, strict=False):
            source = node.block_id if node.host_id is None else node.host_id
            assert source is not None                  # cached content is in one of the two pools
            copies.append(BlockCopy(source, host_id, cache.tokens_per_block, from_host=node.host_id is not None,
                                    to_host=True))
        self._device_work.add(copies)
        held = HeldContext(domain, keys[:len(host_ids)], host_ids, self._device_work.num_added,
                           self._monotonic() + config.timeout_s)
        ticket = self._held.put(held)
        self._not_submitted.append(held)
        self._submit_what_is_due()
        self._figures["Context Only Requests"] += 1
        num_tokens = len(host_ids) * cache.tokens_per_block
        return ContextPhaseParams(config.host, server.port, ticket, num_tokens).to_array()

    def _answer(self, ticket: bytes, fingerprint: bytes, first: int, count: int,
                send: Callable[[bytes, bytes], None]) -> str:
        """On a thread of the server: send the blocks of a ticket. Returns why not all were sent, or ""."""
        held = self._held.take(ticket)
        if held is None:
            return "does not know the ticket, which works once and lapses"
        began = time.monotonic()
        until = began + self._config.timeout_s
        try:
            if not count:                              # the other engine has all blocks
                return ""
            if not (self._wait(self._opened, until) and self._wait(held.is_copied, until)):
                return "is not ready"
            if fingerprint != self._fingerprint or not fingerprint:
                return "has another model, dtype, window or tokens_per_block, or other options that change a block"
            blocks = self._named(held.domain, held.keys)
            for block, host_id in list(zip(blocks, held.host_ids, strict=True))[first:first + count]:
                content = bytes(self._host_block(host_id))
                send(block.key, content)
                held.num_bytes += len(content)
            return "" if first + count <= len(blocks) else "did not have host blocks for the whole prompt"
        finally:
            held.microseconds = int((time.monotonic() - began) * 1e6)
            self._ended.append(held)
            self.wake()

    def _wait(self, event: Any, until: float) -> bool:
        while not event.is_set and not self._is_closed and time.monotonic() < until:
            event.wait(0.1)
        return bool(event.is_set)

    def _lapse(self, now: float, count: int = 0) -> bool:
        """End tickets, as HeldContexts.lapse does. Returns whether there were any."""
        lapsed = self._held.lapse(now, count)
        for held in lapsed:
            self._give_back(held)
        return bool(lapsed)

    def _give_back(self, held: HeldContext) -> None:
        for host_id in held.host_ids:
            self._cache.host.release(host_id)
        self._held.num_blocks -= len(held.host_ids)
        self._note_traffic(held)

    # Contexts from other engines.

    def add(self, admitted: Admitted) -> bool:
        """Let a request wait for its blocks. Returns whether it waits."""
        source, cache, request = admitted.context_phase, self._cache, admitted.request
        if source is None:
            return self._has_store and super().add(admitted)
        self._figures["Generation Only Requests"] += 1
        domain, keys = cache.keys_of(request, (request.prompt_len - 1) // cache.tokens_per_block)
        known = cache.index.walk(domain, keys)
        host_ids = self._reserve(min(len(keys) - len(known), self._room_for_loads), known)
        load = Fetch(domain, keys, len(known), (), host_ids, self._device_work.num_added, source=source,
                     lora_task_id=request.lora_task_id, until=time.monotonic() + self._config.load_timeout_s)
        self._num_reserved_for_loads += len(host_ids)
        self._not_submitted.append(load)
        self._submit_what_is_due()
        if len(keys) == len(known):                    # the thread gives the ticket back
            return False
        self._note_look_up(request, len(known))
        self._waiting.append(Waiting(admitted, load, keys, len(known), self._monotonic() + self._config.load_timeout_s))
        return True

    def _submit(self, due: Any) -> None:
        if isinstance(due, HeldContext):
            due.is_copied.set()
        elif isinstance(due, Fetch):
            self._fetchers.submit(partial(self._fetch, due))
        else:
            super()._submit(due)

    def _fetch(self, load: Fetch) -> None:
        """On a thread: fill the host blocks."""
        began = time.monotonic()
        filled, error = tried(partial(self._fill, load))
        if error is not None:
            load.reason = f"made the fetch raise {type_name(error)}"
        load.microseconds = int((time.monotonic() - began) * 1e6)
        load.num_right = filled or 0
        self._ended.append(load)
        self.wake()

    def _fill(self, load: Fetch) -> int:
        """Return the number of host blocks that were filled. `load.reason` says why not all were."""
        source, config, count = load.source, self._config, len(load.host_ids)
        if source.host not in ((config.host,) if config.peers is None else config.peers):
            load.reason = "is no host of KvTransferConfig.peers"
            return 0
        if not self._wait(self._opened, load.until) or not self._fingerprint:
            load.reason = "is not asked before this engine knows the digest of its weights"
            return 0
        keys = [block.key for block in self._named(load.domain, load.keys)][load.start:load.start + count]
        buffers = [self._host_block(host_id) for host_id in load.host_ids]
        filled, load.reason = self._fetch_from(
            (source.host, source.port), source.ticket, self._fingerprint, load.start, keys, buffers, load.until,
            lambda: self._is_closed)
        load.num_bytes = sum(map(len, buffers[:filled]))
        return filled

    def _take_back(self, ended: Any) -> None:
        if isinstance(ended, HeldContext):
            self._give_back(ended)
        elif isinstance(ended, Fetch):
            self._num_reserved_for_loads -= len(ended.host_ids)
            self._take_in_blocks(ended, ended.num_right or 0)
            self._note_traffic(ended)
        else:
            super()._take_back(ended)

    def _note_traffic(self, ended: HeldContext | Fetch) -> None:
        self._figures["KV Transfer Bytes"] += ended.num_bytes
        self._figures["KV Transfer Microseconds"] += ended.microseconds

    def _judge(self, ended: Sequence[Waiting]) -> tuple[list[Admitted], list[tuple[Admitted, RequestError]]]:
        ready: list[Admitted] = []
        failed: list[tuple[Admitted, RequestError]] = []
        for waiting in ended:
            admitted, load = waiting.admitted, waiting.load
            if not isinstance(load, Fetch) or waiting.num_found == len(load.keys):
                ready.append(admitted)
                continue
            self._figures["KV Transfer Fallbacks"] += 1
            reason = f"the engine at {load.source.host}:{load.source.port} {load.reason or 'is too late'}"
            if not load.reason and load.num_right is not None:
                reason = "this engine had too few free host blocks: raise KvCacheConfig.host_cache_size"
            fact = f"{waiting.num_found} of {counted(len(load.keys), 'block')} of the prompt are here: {reason}"
            if self._config.load_failure_policy == "fail":
                failed.append((admitted, KvTransferError(fact, "KvTransferConfig.load_failure_policy is 'fail'",
                                                         "send the request as context_and_generation")))
            else:
                self._log.log(logging.WARNING, "request %d computes its prompt, because %s",
                              admitted.request.request_id, fact)
                ready.append(admitted)
        return ready, failed
