"""Moves blocks between the prefix cache and a store, through host blocks.

Load: an accepted request whose prompt goes on in the store waits here until its blocks are in host blocks and can be
found. Then it runs as any other, and its claim brings them into the pool. Save: when a request ends, its full blocks
that the store lacks are copied to host blocks before the next step, and written by another thread once that step was
read. A host block goes to a thread only when the device has carried out everything that was asked of it before.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

from ..contained_log import RateLimitedLog, log
from ..errors import RequestError, counted, type_name
from ..handover import BlockCopy, ScheduledBatch
from ..kv.prefix_cache import PrefixCache
from ..kv.prefix_index import BlockKey, Domain, PrefixNode
from ..kv_events import MOST_KEY_BYTES, block_hash, root_hash
from ..one_shot_event import OneShotEvent
from ..option_values import exact_integer, shown_option
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..seams import integers
from ..steps.device_work import DeviceWork
from ..steps.runner import StepRunner
from .interface import KEY_BYTES, BlockStore, StoredBlock
from .threads import Answer, StoreThreads, tried

SAVES_AT_ONCE = 8                # host blocks that loads leave to saves
LEAST_BLOCKS_OF_A_CALL = 8       # longer loads are divided among the threads
MOST_WAITING_SAVES = 4096        # blocks; further ones are left out
MOST_FAILURES, REST_S = 10, 60.0
SECONDS_BETWEEN_REFRESHES = 5.0
SECONDS_TO_OPEN = 1.0            # a large checkpoint takes longer the first time; the store is used from then on
SECONDS_TO_LOAD = 2.0            # after these a request computes its prompt
SECONDS_WITHOUT_A_SAVE = 10.0    # after these the end of the engine waits no longer for the store


@dataclass(eq=False, slots=True)
class Load:
    """Blocks on their way to host blocks. `num_right` is None until the thread has ended."""

    domain: Domain
    keys: list[BlockKey]         # of the whole beginning of the prompt
    start: int                   # how many of them were cached already
    blocks: tuple[StoredBlock, ...]
    host_ids: list[int]
    ticket: int
    num_right: int | None = None
    error: BaseException | None = None
    lora_task_id: int | None = None
    is_late: bool = False        # a request no longer waits for it
    parts: list["_Part"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Part:
    """A share of a load: one call of the store."""

    load: Load
    start: int
    end: int
    num_right: int = 0
    has_ended: bool = False


@dataclass(eq=False, slots=True)
class _Save:
    block: StoredBlock
    host_id: int
    ticket: int
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits. `keys` are those of its prompt, of which `num_known` blocks were cached already."""

    admitted: Admitted
    load: Load
    keys: list[BlockKey]
    num_known: int
    until: float
    num_found: int = 0           # of them, once the load has ended


class StoredBlocks:
    """The traffic between a prefix cache and a store. The worker calls all methods.

    fingerprint   returns a digest, of at most 64 bytes, of everything that the content of a block depends on besides
                  its tokens, adapter and cache_salt. Called once, on a thread; until then the store is not used
    host_block    id of a host block -> its memory
    min_tokens    fewer tokens are computed, not loaded
    monotonic     clock in seconds
    wake          called by a thread when a load has ended
    """

    def __init__(self, store: BlockStore, cache: PrefixCache, *, fingerprint: Callable[[], bytes],
                 host_block: Callable[[int], memoryview], min_tokens: int, num_threads: int,
                 monotonic: Callable[[], float], threads: StoreThreads | None = None) -> None:
        self._store, self._cache, self._host_block = store, cache, host_block
        self._min_tokens, self._monotonic = min_tokens, monotonic
        self._num_threads = num_threads
        self._threads = StoreThreads(num_threads) if threads is None else threads
        self._make_fingerprint, self._fingerprint = fingerprint, b""
        self._has_begun, self._opened, self._is_closed = False, OneShotEvent(), False
        self.wake: Callable[[], None] = lambda: None
        self._device_work = DeviceWork()                     # until `attach`
        self._runner: StepRunner | None = None
        self._waiting: list[Waiting] = []
        self._loads: dict[bytes, Load] = {}                  # key of the first block -> load, until it has ended
        self._to_save: deque[tuple[StoredBlock, PrefixNode]] = deque()
        self._saving: set[bytes] = set()
        self._saved_at = float("-inf")                       # when the last save ended, or the first one began
        self._not_submitted: deque[Any] = deque()            # until the device has done what was asked before
        self._num_reserved_for_loads, self._num_saves = 0, 0
        self._ended: deque[Any] = deque()                    # the threads append
        self._failures_in_a_row, self._rests_until = 0, float("-inf")
        self._refreshed_at = float("-inf")
        self._log = RateLimitedLog(monotonic)
        self._figures = dict.fromkeys(("Store Loads", "Store Loaded Blocks", "Store Failed Loads", "Store Saved Blocks",
                                       "Store Skipped Saves", "External Lookup Tokens", "External Hit Tokens"), 0)
        cache.ended = self._offer

    def attach(self, device_work: DeviceWork, runner: StepRunner) -> None:
        """Set the device work of the steps, and what runs them. Call it before all other methods."""
        self._device_work, self._runner = device_work, runner

    def begin(self) -> None:
        """Begin an iteration: `collect`. The first one starts the threads and finds the fingerprint, for which it waits
        a moment, so that the first request finds the store.
        """
        if not self._has_begun:
            self._has_begun = True
            self._threads.submit(self._open)
            self._opened.wait(SECONDS_TO_OPEN)
        self.collect()

    def figures(self) -> dict[str, int]:
        """Return the statistics of the traffic and of the store."""
        figures = {**self._figures, "Requests Loading": len(self._waiting)}
        return figures | self._ask("figures", dict[str, int](), lambda: integers(self._store.figures()))

    def _open(self) -> None:
        fingerprint, error = tried(self._checked_fingerprint)
        self._fingerprint = fingerprint or b""
        self._opened.set()
        if error is not None:
            log.error("the store is not used, because the fingerprint of the model raised %s: %s", type_name(error),
                      error)

    def _checked_fingerprint(self) -> bytes:
        fingerprint = self._make_fingerprint()
        if type(fingerprint) is not bytes or not 1 <= len(fingerprint) <= MOST_KEY_BYTES:
            raise ValueError(f"it is {fingerprint!r:.200}; expected 1 to {MOST_KEY_BYTES} bytes")
        return fingerprint

    @property
    def _is_ready(self) -> bool:
        return bool(self._fingerprint) and self._monotonic() >= self._rests_until

    # Requests that wait.

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of the requests that wait here."""
        return sum(waiting.admitted.request.prompt_len for waiting in self._waiting)

    @property
    def request_ids(self) -> set[int]:
        return {waiting.admitted.request.request_id for waiting in self._waiting}

    def add(self, admitted: Admitted) -> bool:
        """Let a request wait for its blocks, if the store has enough of them. Returns whether it waits."""
        cache, request = self._cache, admitted.request
        num_blocks = (request.prompt_len - 1) // cache.tokens_per_block    # the last token is always computed
        if num_blocks * cache.tokens_per_block < self._min_tokens or not self._is_ready or not _may_be_stored(request):
            return False
        self._refresh()
        domain, keys = cache.keys_of(request, num_blocks)
        known = cache.index.walk(domain, keys)
        blocks = self._named(domain, keys)[len(known):]
        if len(blocks) * cache.tokens_per_block < self._min_tokens:
            return False
        load = self._loads.get(blocks[0].key) or self._start_load(request, domain, keys, known, blocks)
        self._note_look_up(request, len(known))
        if load is not None:
            self._waiting.append(Waiting(admitted, load, keys, len(known), self._monotonic() + SECONDS_TO_LOAD))
        return load is not None

    def _note_look_up(self, request: LlmRequest, num_known: int) -> None:
        self._figures["External Lookup Tokens"] += request.prompt_len - num_known * self._cache.tokens_per_block

    def _refresh(self) -> None:
        refresh, now = getattr(self._store, "refresh", None), self._monotonic()
        if refresh is not None and now - self._refreshed_at >= SECONDS_BETWEEN_REFRESHES:
            self._refreshed_at = now
            self._threads.submit(partial(self._call_on_thread, "refresh", refresh))

    def _call_on_thread(self, method: str, call: Callable[[], None]) -> None:
        _, error = tried(call)
        if error is not None:
            self._log.log(logging.WARNING, "`%s` of the store raised %s", method, type_name(error), raised=error)

    def _start_load(self, request: LlmRequest, domain: Domain, keys: list[BlockKey], known: list[PrefixNode],
                    blocks: tuple[StoredBlock, ...]) -> Load | None:
        unit, host = self._cache.tokens_per_block, self._cache.host
        found = min(self._count(blocks, 0), self._room_for_loads)
        if found * unit < self._min_tokens:
            return None
        host_ids = self._reserve(found, known)
        if len(host_ids) * unit < self._min_tokens:
            for host_id in host_ids:
                host.release(host_id)
            return None
        load = Load(domain, keys, len(known), blocks[:len(host_ids)], host_ids, self._device_work.num_added,
                    lora_task_id=request.lora_task_id)
        self._loads[blocks[0].key] = load
        self._num_reserved_for_loads += len(host_ids)
        self._not_submitted.append(load)
        self._submit_what_is_due()
        return load

    @property
    def _room_for_loads(self) -> int:
        num_blocks = self._cache.host.num_blocks
        return max(num_blocks - SAVES_AT_ONCE, num_blocks // 2) - self._num_reserved_for_loads

    def _reserve(self, count: int, kept: Sequence[PrefixNode]) -> list[int]:
        """Reserve up to `count` host blocks, and leave the contents of `kept` where they are.

        Copies that a claim left when it failed may write to those blocks, or be what is kept: they come first.
        """
        self._device_work.add(self._cache.take_copies())
        in_host = [node.host_id for node in kept if node.host_id is not None]
        for host_id in in_host:
            self._cache.host.pin(host_id)
        host_ids = self._cache.reserve_host(count)
        for host_id in in_host:
            self._cache.host.unpin(host_id)
        return host_ids

    def take_ready(self) -> tuple[list[Admitted], list[tuple[Admitted, RequestError]]]:
        """Return the requests whose load has ended or lasts too long, and those that end without it, with the error;
        both in order of arrival.
        """
        self.collect()
        now, ended, left = self._monotonic(), [], []
        for waiting in self._waiting:
            if waiting.load.num_right is None and now < waiting.until:
                left.append(waiting)
                continue
            ended.append(waiting)
            waiting.num_found = len(self._cache.index.walk(waiting.load.domain, waiting.keys))
            if waiting.load.num_right:
                self._figures["External Hit Tokens"] += self._cache.tokens_per_block * max(
                    waiting.num_found - waiting.num_known, 0)
            if waiting.load.blocks and waiting.load.num_right is None and not waiting.load.is_late:
                waiting.load.is_late = True
                self._note_late(waiting.load)
        self._waiting = left
        return self._judge(ended)

    def _note_late(self, load: Load) -> None:
        self._log.log(logging.WARNING, "the store takes more than %.0f s to load %s; the prompt is computed",
                      SECONDS_TO_LOAD, counted(len(load.blocks), "block"))
        self._count_failure()

    def _judge(self, ended: Sequence[Waiting]) -> tuple[list[Admitted], list[tuple[Admitted, RequestError]]]:
        return [waiting.admitted for waiting in ended], []

    def withdraw(self, request_ids: Set[int]) -> list[Admitted]:
        """Remove the requests with these ids and return them."""
        taken = [waiting.admitted for waiting in self._waiting if waiting.admitted.request.request_id in request_ids]
        self._waiting = [waiting for waiting in self._waiting
                         if waiting.admitted.request.request_id not in request_ids]
        return taken

    def clear(self) -> None:
        """Forget all requests, and what waits to be saved."""
        self._waiting.clear()
        self._drop_saves()

    # Saves.

    def _offer(self, request: LlmRequest, nodes: Sequence[PrefixNode]) -> None:
        """Note the full blocks of a request that has ended, to be saved if the store lacks them."""
        if not self._is_ready or not _may_be_stored(request):
            self._figures["Store Skipped Saves"] += len(nodes)
            return
        blocks = self._named(self._cache.domain_of(request), [node.key for node in nodes])
        known = self._count(blocks, len(blocks))
        for block, node in list(zip(blocks, nodes, strict=True))[known:]:
            if len(self._to_save) >= MOST_WAITING_SAVES:
                self._figures["Store Skipped Saves"] += 1
            elif block.key not in self._saving:
                if not self.is_saving:
                    self._saved_at = self._monotonic()
                self._saving.add(block.key)
                self._to_save.append((block, node))

    def plan(self) -> None:
        """Ask the device to copy blocks that wait to be saved.

        Content in host blocks may be lost for them, so call it before the scheduler counts what can be reused.
        """
        while self._to_save and self._num_saves < SAVES_AT_ONCE:
            block, node = self._to_save.popleft()
            in_host = node.host_id
            source = node.block_id if in_host is None else in_host
            reserved = self._reserve(1, [node])
            host_id = reserved[0] if reserved else None
            if source is None or host_id is None:          # evicted meanwhile, or no room
                if host_id is not None:
                    self._cache.host.release(host_id)
                self._saving.discard(block.key)
                self._figures["Store Skipped Saves"] += 1
                continue
            self._device_work.add([BlockCopy(source, host_id, len(block.token_ids),
                                             from_host=in_host is not None, to_host=True)])
            self._num_saves += 1
            self._not_submitted.append(_Save(block, host_id, self._device_work.num_added))

    def _drop_saves(self) -> None:
        """Forget what no thread has yet."""
        copied = [each for each in self._not_submitted if isinstance(each, _Save)]
        for save in copied:
            self._not_submitted.remove(save)
            self._cache.host.release(save.host_id)
        self._num_saves -= len(copied)
        dropped = [*(save.block.key for save in copied), *(block.key for block, _ in self._to_save)]
        self._to_save.clear()
        self._saving.difference_update(dropped)
        self._figures["Store Skipped Saves"] += len(dropped)

    # Both.

    @property
    def is_saving(self) -> bool:
        """Whether blocks wait to be saved, and the store still saves some."""
        return bool(self._to_save or self._num_saves) and (
            self._monotonic() - self._saved_at < SECONDS_WITHOUT_A_SAVE)

    def collect(self) -> None:
        """Hand over what the device has copied, and take back what the threads have done."""
        self._submit_what_is_due()
        while self._ended:
            self._take_back(self._ended.popleft())

    def _take_back(self, ended: Any) -> None:
        if isinstance(ended, _Part):
            self._join(ended)
        else:
            self._num_saves, self._saved_at = self._num_saves - 1, self._monotonic()
            self._saving.discard(ended.block.key)
            self._cache.host.release(ended.host_id)
            if ended.error is None:
                self._failures_in_a_row = 0
                self._figures["Store Saved Blocks"] += 1
            else:
                self._figures["Store Skipped Saves"] += 1
                self._note_failure("save", ended.error)

    def run_operations(self) -> bool:
        """Have an idle device carry out what it was asked, without a step. Returns whether there was anything to do.

        Raises DeviceLostError. Call it with no step in flight.
        """
        self.plan()
        self.collect()
        if not self._not_submitted or self._runner is None:
            return False
        if self._device_work.has_pending:
            step = self._runner.start(ScheduledBatch(0))
            if self._runner.read(step) is None:            # it is repeated with the next step
                self._drop_saves()
                return False
        self._submit_what_is_due()
        return True

    def close(self) -> None:
        """End the threads and the store. Idempotent. A call that lasts too long is not waited for; the store is closed
        when it has returned.
        """
        if not self._is_closed:
            self._is_closed = True
            if self._threads.close(SECONDS_WITHOUT_A_SAVE, partial(self._call_on_thread, "close", self._store.close)):
                self._ask("close", None, self._store.close)
            else:
                log.warning("a call of the store has not returned for %.0f s; the engine ends without it",
                            SECONDS_WITHOUT_A_SAVE)

    def _submit_what_is_due(self) -> None:
        while self._not_submitted and self._not_submitted[0].ticket <= self._device_work.num_done:
            self._submit(self._not_submitted.popleft())

    def _submit(self, due: Any) -> None:
        if not isinstance(due, Load):
            self._threads.submit(partial(self._run_save, due))
            return
        count = len(due.blocks)
        num_parts = max(min(self._num_threads, count // LEAST_BLOCKS_OF_A_CALL), 1)
        ends = [count * part // num_parts for part in range(num_parts + 1)]
        due.parts = [_Part(due, start, end) for start, end in pairwise(ends)]
        for part in due.parts:
            self._threads.submit(partial(self._run_load, part))

    def _run_load(self, part: _Part) -> None:
        """On a thread: have the store fill the host blocks of a part."""
        num_right, error = tried(partial(self._fill_part, part))
        part.num_right = num_right or 0
        part.load.error = part.load.error or error
        self._ended.append(part)
        self.wake()

    def _fill_part(self, part: _Part) -> int:
        """Return the number of host blocks that the store filled. Raises ValueError."""
        blocks, host_ids = part.load.blocks[part.start:part.end], part.load.host_ids[part.start:part.end]
        return _share(self._store.load(blocks, tuple(map(self._host_block, host_ids))), blocks)

    def _count(self, blocks: Sequence[StoredBlock], default: int) -> int:
        """Return how many leading blocks the store has, or `default` if it does not say."""
        return self._ask("count", default, lambda: _share(self._store.count(blocks), blocks))

    def _run_save(self, save: _Save) -> None:
        """On a thread: have the store save a block."""
        _, save.error = tried(lambda: self._store.save(save.block, self._host_block(save.host_id)))
        self._ended.append(save)
        self.wake()

    def _join(self, part: _Part) -> None:
        """Note that a part of a load has ended. The last one ends the load."""
        part.has_ended, load = True, part.load
        if all(each.has_ended for each in load.parts):
            load.num_right = 0
            for each in load.parts:
                load.num_right += each.num_right
                if each.num_right < each.end - each.start:
                    break
            self._take_in(load)

    def _take_in(self, load: Load) -> None:
        """Make loaded blocks findable, below the block that they follow if it still is."""
        num_right = load.num_right
        assert num_right is not None
        del self._loads[load.blocks[0].key]
        self._num_reserved_for_loads -= len(load.host_ids)
        if load.error is not None:
            num_right = 0
            self._note_failure("load", load.error)
        elif not load.is_late:
            self._failures_in_a_row = 0
        taken = self._take_in_blocks(load, num_right)
        self._figures["Store Loads"] += 1
        self._figures["Store Loaded Blocks"] += taken
        self._figures["Store Failed Loads"] += num_right < len(load.blocks)

    def _take_in_blocks(self, load: Load, num_right: int) -> int:
        """Make the first `num_right` blocks findable, and give back the other host blocks. Returns how many can be."""
        left = self._cache.take_in(load.domain, load.keys, load.start, load.host_ids[:num_right], load.lora_task_id)
        for host_id in [*left, *load.host_ids[num_right:]]:
            self._cache.host.release(host_id)
        return num_right - len(left)

    def _named(self, domain: Domain, keys: Sequence[BlockKey]) -> tuple[StoredBlock, ...]:
        """Return the names of blocks, as a tuple, which a store cannot change."""
        parent, blocks = root_hash(self._fingerprint, *domain, size=KEY_BYTES), list[StoredBlock]()
        for key in keys:
            name = block_hash(b"", parent, key.tokens, key.extra_ids, size=KEY_BYTES)
            blocks.append(StoredBlock(name, parent, key.tokens, key.extra_ids))
            parent = name
        return tuple(blocks)

    def _ask(self, method: str, default: Answer, call: Callable[[], Answer]) -> Answer:
        """Return what a method of the store returns to the worker, or `default` if it raises, which is noted."""
        answer, error = tried(call)
        if error is None:
            return cast(Answer, answer)
        self._note_failure(method, error)
        return default

    def _note_failure(self, method: str, error: BaseException) -> None:
        self._log.log(logging.WARNING, "`%s` of the store raised %s; what it has is computed", method, type_name(error),
                      raised=error)
        self._count_failure()

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MOST_FAILURES:
            self._failures_in_a_row, self._rests_until = 0, self._monotonic() + REST_S
            self._drop_saves()
            log.warning("the store rests for %.0f s after %s in a row", REST_S, counted(MOST_FAILURES, "failure"))


def _share(answer: Any, blocks: Sequence[StoredBlock]) -> int:
    """Return what a store says of blocks. Raises ValueError unless it is an integer from 0 to their number."""
    number = exact_integer(answer)
    if number is None or not 0 <= number <= len(blocks):
        raise ValueError(f"it says {shown_option(answer):.200} of {counted(len(blocks), 'block')}")
    return number


def _may_be_stored(request: LlmRequest) -> bool:
    """Whether its blocks mean the same in another process: a salt that the engine made does not."""
    return not isinstance(request.cache_salt, int)
