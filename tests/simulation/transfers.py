"""The other engines of a world: one takes the prompts of its context_only requests, one has any prompt.

The engine also takes its own tickets. The tokens and stamps of the simulated device travel with the bytes of a block.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from batch_manager.kv_events import block_hash, root_hash
from batch_manager.parallel.channel import LostError
from batch_manager.requests.context_phase import TICKET_BYTES, ContextPhaseParams
from batch_manager.stores.handed_blocks import HandedBlocks
from batch_manager.stores.interface import KEY_BYTES
from batch_manager.stores.stored_blocks import StoredBlocks
from batch_manager.testing.scripted_backend import HOST_TOKEN

from .faults import Faults
from .history import Handed
from .traffic import SimulatedThreads

if TYPE_CHECKING:
    from .world import SimulatedWorld

MORE_FAULTS = 4           # the chances of these faults are fewer than those of others
MOST_TICKETS = 12         # of the engine's own, that may come back
PORT = 1


@dataclass(slots=True)
class Wish:
    """What a request has to do with another engine.

    params   None: another engine is to go on with it
    prompt   of the ticket; empty: any
    """

    fails: bool
    params: np.ndarray | None = None
    prompt: Sequence[int] = ()
    salt: str | None = None

    def ask(self, tensors: dict[str, Any], options: dict[str, Any], handed: Handed) -> None:
        tensors.pop("return_context_logits", None)
        if self.params is None:
            options["request_type"] = "context_only"
            handed.is_context_only, handed.max_new_tokens = True, 1
            return
        options["request_type"] = "generation_only"
        tensors["context_phase_params"] = self.params
        handed.may_fail_to_load = self.fails
        if self.prompt:
            options["cache_salt"] = self.salt


class SimulatedTransfers:
    """Stands for the network: `fetch` is what gets blocks, and the server of the engine that nobody connects to."""

    port = PORT

    def __init__(self, world: "SimulatedWorld") -> None:
        swarm = world.swarm
        assert swarm.transfers is not None
        self.world, self._config = world, swarm.transfers
        self.faults = Faults(Random(f"transfer faults {swarm.seed}"), swarm.faults, MORE_FAULTS * swarm.fault_rate)
        self._rng, self._wishes = self.faults.rng, Random(f"handed {swarm.seed}")
        self._own: dict[bytes, Handed] = {}                          # ticket -> request, oldest first
        self._of_another: dict[bytes, tuple[list[int], str | None]] = {}        # ticket -> prompt and salt
        self.senders = SimulatedThreads(world, self._rng, self._may_run)
        self.fetchers = SimulatedThreads(world, self._rng, self._may_run)
        self.all_threads = [self.senders, self.fetchers]
        self._moved, self._num_held = Figures(), 0

    def watch(self, stored: StoredBlocks) -> None:
        assert isinstance(stored, HandedBlocks) and stored._server is not None
        stored._server.close()
        stored._server, stored._fetch_from = self, self.fetch
        stored._senders, stored._fetchers = self.senders, self.fetchers
        self._stored = stored
        lapse = stored._lapse

        def watched(now: float, count: int = 0) -> bool:
            has_lapsed = lapse(now, count)
            if has_lapsed:
                self.world.mark("a ticket makes room" if count else "a ticket lapses")
            return has_lapsed
        stored._lapse = watched

    def close(self) -> None:
        """Of the server."""

    # requests

    def wish(self, prompt: list[int], width: int) -> Wish | None:
        """Choose what the next request has to do with another engine; None: nothing."""
        rng, fails = self._wishes, self._config.load_failure_policy == "fail"
        if rng.random() >= self.world.swarm.traffic.handed:
            return None
        if width == 1 and rng.random() < 0.5:
            return Wish(fails)
        if self._own and rng.random() < 0.6:
            ticket = rng.choice(list(self._own))
            handed = self._own[ticket]
            again = self._fault("transfer.used_twice") is not None
            if not again:
                del self._own[ticket]
            return Wish(fails, self._params(ticket), handed.prompt, handed.salt)
        fault, ticket = self._fault("transfer.guessed", "transfer.another_prompt"), rng.randbytes(TICKET_BYTES)
        salt = rng.choice([None, None, "a"])
        if fault != "transfer.guessed":
            other = prompt if fault is None else [*prompt[:len(prompt) // 2], *prompt]
            self._of_another[ticket] = list(other), salt
        return Wish(fails, self._params(ticket), prompt, salt)

    def _params(self, ticket: bytes) -> np.ndarray:
        return ContextPhaseParams(self._config.host, PORT, ticket, 0).to_array()

    def given(self, params: np.ndarray, handed: Handed) -> None:
        """Note the ticket of a response."""
        where = ContextPhaseParams.of(params.copy())
        self.world.check((where.host, where.port) == (self._config.host, PORT), f"I36: a ticket leads to {where}")
        self._own[where.ticket] = handed
        if len(self._own) > MOST_TICKETS:
            del self._own[next(iter(self._own))]
        if where.num_tokens:
            self.world.mark("a context is held")

    # turns

    def move(self) -> None:
        """Between two turns: another engine takes blocks, and jobs end."""
        held = self._stored._held._held
        if held and self._rng.random() < 0.2:
            ticket = self._rng.choice(list(held))
            if ticket in self._own:
                self.senders.submit(partial(self._take, ticket, self._own.pop(ticket)))
        for threads in self.all_threads:
            threads.move(lambda: self._fault("transfer.slow") is not None)

    def _may_run(self, job: Callable[[], None]) -> bool:
        """Whether the device has copied the blocks of the ticket, for which the thread would wait."""
        (first, *_) = job.args
        held = self._stored._held._held.get(first if type(first) is bytes else first.source.ticket)
        return held is None or held.is_copied.is_set

    def held_ids(self) -> set[int]:
        return {host_id for held in self._stored._held._held.values() for host_id in held.host_ids}

    def violations(self, now: float) -> list[str]:
        """Return what is wrong after a turn that began at `now`."""
        stored, found = self._stored, []
        held = stored._held._held.values()
        if any(each.expires_at <= now for each in held):
            found.append("I36: blocks are held for a ticket that has expired")
        most = int(self.world.swarm.host_blocks * self._config.held_blocks_fraction)
        if not len(self.held_ids()) <= stored._held.num_blocks <= most:
            found.append(f"I36: {stored._held.num_blocks} blocks are said to be held, at most {most}")
        figures = stored._figures
        if figures["KV Transfer Fallbacks"] > self._moved.fallbacks:
            self._moved.fallbacks = figures["KV Transfer Fallbacks"]
            self.world.mark("fails with its transfer" if self._config.load_failure_policy == "fail"
                            else "a transfer falls back")
        if figures["KV Transfer Bytes"] > self._moved.num_bytes:
            found.append(f"I36: {figures['KV Transfer Bytes']} bytes are said to be moved, at most "
                         f"{self._moved.num_bytes}")
        return found

    # exchanges

    def fetch(self, address: tuple[str, int], ticket: bytes, fingerprint: bytes, first: int, keys: Sequence[bytes],
              buffers: Sequence[memoryview], deadline: float, is_closed: Callable[[], bool]) -> tuple[int, str]:
        """See parallel.block_exchange."""
        device, filled = self.world.device, 0
        host_ids = device.take_host_ids()
        fault = self._fault("transfer.gone", "transfer.breaks", "transfer.raises")
        if fault == "transfer.raises":
            raise self._rng.choice([OSError, ValueError, MemoryError])("planted")
        if fault == "transfer.gone":
            return 0, "cannot be reached"
        most = self._rng.randrange(len(keys)) if keys and fault else len(keys)

        def send(key: bytes, content: bytes, stamp: tuple | None) -> None:
            nonlocal filled
            if filled < len(keys) and key != keys[filled]:
                raise LostError("has the blocks of another prompt")
            if filled == most:
                raise LostError("is lost")
            buffers[filled][:] = content
            device.set_host_stamp(host_ids[filled], stamp)
            filled += 1
            self._moved.num_bytes += 2 * len(content)                # both engines count, and may be the same one
            self.world.mark("blocks come from another engine")
        try:
            answer = self._answer_of_another if ticket in self._of_another else self._answer
            reason = answer(ticket, fingerprint, first, len(keys), send)
        except LostError as error:
            reason = str(error)
        if filled < len(keys):
            buffers[filled][:] = b"\1" * len(buffers[filled])         # what came of a block that is not whole
        return filled, reason

    def _answer(self, ticket: bytes, fingerprint: bytes, first: int, count: int,
                send: Callable[[bytes, bytes, tuple | None], None]) -> str:
        """The engine's own answer."""
        device = self.world.device
        device.take_host_ids()
        return self._stored._answer(ticket, fingerprint, first, count, lambda key, content: send(
            key, content, device.host_stamp(device.take_host_ids()[-1])))

    def _answer_of_another(self, ticket: bytes, fingerprint: bytes, first: int, count: int,
                           send: Callable[[bytes, bytes, tuple | None], None]) -> str:
        prompt, salt = self._of_another.pop(ticket)
        blocks = self._blocks(prompt, salt, fingerprint)
        for key, tokens, stamp in blocks[first:first + count]:
            content = np.zeros(len(tokens), HOST_TOKEN)
            content["token"] = tokens
            send(key, content.tobytes(), stamp)
        return "" if first + count <= len(blocks) else "did not have host blocks for the whole prompt"

    def _blocks(self, prompt: Sequence[int], salt: str | None, fingerprint: bytes
                ) -> list[tuple[bytes, list[int], tuple]]:
        """Return the (key, tokens, stamp) of the full blocks of a prompt."""
        size, parent, found = self.world.swarm.tokens_per_block, root_hash(fingerprint, None, salt, False,
                                                                           size=KEY_BYTES), []
        for start in range(0, (len(prompt) - 1) // size * size, size):
            tokens = list(prompt[start:start + size])
            parent = block_hash(b"", parent, tokens, None, size=KEY_BYTES)
            found.append((parent, tokens, (salt, None, crc32(array("q", prompt[:start]).tobytes()))))
        return found

    def _take(self, ticket: bytes, handed: Handed) -> None:
        """On a thread of the server: another engine takes the blocks of a context_only request, and looks at them."""
        stored, check, sent = self._stored, self.world.check, []
        held = stored._held._held.get(ticket)
        blocks = self._blocks(handed.prompt, handed.salt, stored._fingerprint)
        first = self._rng.randint(0, len(blocks))
        count, is_closed = len(blocks) - first, stored._is_closed
        other_model = self._fault("transfer.another_model") is not None
        most = self._rng.randrange(count) if count and self._fault("transfer.breaks") else count

        def send(key: bytes, content: bytes, stamp: tuple | None) -> None:
            if len(sent) == most:
                raise LostError("is gone")
            name, tokens, expected = blocks[first + len(sent)]
            found = np.frombuffer(content, HOST_TOKEN)["token"].tolist()
            check((key, found, stamp) == (name, tokens, expected), "I36: another engine gets other blocks")
            sent.append(key)
            self._moved.num_bytes += len(content)
        try:
            reason = self._answer(ticket, b"another" if other_model else stored._fingerprint, first, count, send)
        except LostError:
            self._moved.num_bytes += len(blocks) * 64 * HOST_TOKEN.itemsize
            return
        if held is None or is_closed:
            check(not sent, "I36: a ticket that has lapsed is of use")
            return
        if other_model and count:
            check(not sent and bool(reason), "I36: an engine with another model gets blocks")
            return
        expected = len(blocks[first:min(first + count, len(held.host_ids))]) if count else 0
        check(len(sent) == expected and bool(reason) == (count > 0 and len(held.host_ids) < len(blocks)),
              f"I36: another engine gets {len(sent)} of {expected} blocks: {reason}")
        if sent:
            self.world.mark("another engine takes blocks")

    def _fault(self, *names: str) -> str | None:
        enabled = [name for name in names if name in self.world.swarm.faults]
        if not enabled or self._rng.random() >= MORE_FAULTS * self.world.swarm.fault_rate:
            return None
        fault = self._rng.choice(enabled)
        self.faults.hit(fault)
        return fault


@dataclass(slots=True)
class Figures:
    """What a world has counted of its transfers."""

    fallbacks: int = 0
    num_bytes: int = 0
