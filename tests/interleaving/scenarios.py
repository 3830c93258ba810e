"""Small scenarios, each with one set of threads to interleave.

A scenario is the body of the user's main thread. A manager that still runs after the body is a violation.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from batch_manager import ManagerClosedError, gpt_manager, interpreter_exit, worker
from batch_manager.gpt_manager import SECONDS_TO_STOP_AFTER_A_TIMEOUT
from batch_manager.loop import generation_loop

from .doubles import Thread
from .world import InterleavedWorld

LINES_OF_THE_MANAGER = frozenset(module.__file__ for module in (gpt_manager, worker, interpreter_exit, weakref))
LINES_OF_THE_LOOP = frozenset({generation_loop.__file__})


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario: a function that the main thread runs, and its yield points.

    watched_files   files in which each line is a yield point; locks, events, threads and callbacks always are
    is_timeless     whether the scenario finishes on real threads without waiting for a timeout
    """

    body: Callable[[InterleavedWorld], None]
    watched_files: frozenset[str] = frozenset()
    is_timeless: bool = True


SCENARIOS: dict[str, Scenario] = {}


def scenario(body: Callable[[InterleavedWorld], None]) -> Callable[[InterleavedWorld], None]:
    """Add two scenarios with this body. In the second one, each line of the manager is a yield point too."""
    add(body.__name__, body, LINES_OF_THE_MANAGER)
    return body


def add(name: str, body: Callable[[InterleavedWorld], None], lines: frozenset[str], *,
        is_timeless: bool = True) -> None:
    SCENARIOS[name] = Scenario(body, is_timeless=is_timeless)
    SCENARIOS[f"{name}/lines"] = Scenario(body, lines, is_timeless)


# ---------------------------------------------------------------------- shutdown


@scenario
def two_threads_drain(world: InterleavedWorld) -> None:
    client = world.make("a", (1, 2), (2, 1))
    world.spawn("other", world.shutdown)
    world.shutdown()
    if any(error for errors in client.ended.values() for error in errors):
        world.wrong(f"C14: a drain did not finish what was accepted: {client.ended}")


@scenario
def one_drains_and_one_aborts(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 2))
    world.spawn("other", lambda: world.shutdown(drain=False))
    world.shutdown()


@scenario
def two_threads_abort(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 3))
    world.spawn("other", lambda: world.shutdown(drain=False))
    world.shutdown(drain=False)


@scenario
def a_drain_with_a_timeout(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 3))
    world.spawn("other", lambda: world.shutdown(timeout=2.0))
    world.shutdown(timeout=1.0)
    world.shutdown()


def a_callback_blocks_while_a_timeout_runs_out(world: InterleavedWorld) -> None:
    gate = world.event()
    client = world.client("a")
    client.on_send = lambda *_: gate.wait()
    world.make("a", (1, 1))
    world.shutdown(timeout=1.0, may_block=True)
    gate.set()
    world.shutdown(timeout=100.0)


add("a_callback_blocks_while_a_timeout_runs_out", a_callback_blocks_while_a_timeout_runs_out, LINES_OF_THE_MANAGER,
    is_timeless=False)


@scenario
def a_callback_asks_for_the_end(world: InterleavedWorld) -> None:
    client = world.client("a")
    client.on_send = lambda request_id, _: world.shutdown(drain=request_id == 1, from_callback=True)
    gate = world.event()
    client.on_get = gate.wait    # the manager that is shut down exists when the gate opens
    world.make("a", (1, 1), (2, 2))
    gate.set()
    world.wait_until_terminate()


@scenario
def a_callback_asks_while_another_thread_does(world: InterleavedWorld) -> None:
    client, gate = world.client("a"), world.event()
    client.on_get = gate.wait
    client.on_send = lambda *_: world.shutdown(from_callback=True)
    world.make("a", (1, 1))
    gate.set()
    world.shutdown(drain=False)


@scenario
def a_signal_handler_aborts_while_its_thread_drains(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 2))
    world.scheduler.interrupts_only = "main"
    world.scheduler.interrupt = lambda: world.shutdown(drain=False)
    world.shutdown()
    world.scheduler.interrupt = None


@scenario
def a_with_block_ends_while_another_thread_aborts(world: InterleavedWorld) -> None:
    world.make("a", (1, 1))
    manager = world.managers["a"]
    with manager:
        world.spawn("other", lambda: world.shutdown(drain=False))
    world.shutdown()


# ---------------------------------------------------------------------- the last reference


@scenario
def another_thread_drops_the_last_reference(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 2))
    world.spawn("dropper", world.managers.clear)


@scenario
def the_collector_finds_it_on_any_thread(world: InterleavedWorld) -> None:
    world.scheduler.interrupt = world.managers.clear
    world.make("a", (1, 2))
    done = world.event()
    world.spawn("other", done.set)
    done.wait()
    world.scheduler.interrupt = None
    world.managers.clear()


@scenario
def the_worker_drops_the_last_reference(world: InterleavedWorld) -> None:
    client, gate = world.client("a"), world.event()
    client.on_get = gate.wait
    client.on_send = lambda *_: world.managers.clear()
    world.make("a", (1, 1), (2, 2))
    gate.set()


@scenario
def it_is_dropped_while_another_thread_shuts_it_down(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 2))
    manager = world.managers["a"]
    client = world.clients["a"]

    def end(box=[manager]) -> None:    # noqa: B006  the only call empties it
        if box.pop().shutdown() and client.open:
            world.wrong(f"C14: shutdown returned True and {client.open} have had no final")

    world.spawn("other", end)
    world.managers.clear()


# ---------------------------------------------------------------------- waking


@scenario
def a_notified_worker_fetches_at_once(world: InterleavedWorld) -> None:
    client, told = world.make("a"), world.event()
    client.on_send = lambda *_: told.set()

    def put_and_notify() -> None:
        client.pending.append((1, 1))
        world.managers["a"].notify()

    world.spawn("other", put_and_notify)
    told.wait()
    if world.scheduler.forced_moves:
        world.wrong("C22: the worker fetched only when its idle time was over, although it was notified")
    world.shutdown()


@scenario
def two_threads_notify(world: InterleavedWorld) -> None:
    client, both = world.make("a"), world.event()
    client.on_send = lambda *_: both.set() if len(client.ended) == 2 else None

    def put_and_notify(request_id: int) -> None:
        client.pending.append((request_id, 1))
        world.managers["a"].notify()

    world.spawn("other", lambda: put_and_notify(1))
    put_and_notify(2)
    both.wait()
    if world.scheduler.forced_moves:
        world.wrong("C22: the worker fetched only when its idle time was over, although it was notified")
    world.shutdown(drain=False)


@scenario
def a_stop_is_noticed_after_notify(world: InterleavedWorld) -> None:
    client, told = world.client("a"), world.event()
    client.on_send = lambda *_: told.set()
    world.make("a", (1, 5))

    def stop() -> None:
        client.stops.add(1)
        world.managers["a"].notify()

    world.spawn("other", stop)
    told.wait()
    world.shutdown()


@scenario
def everybody_waits_for_the_terminate_request(world: InterleavedWorld) -> None:
    world.terminate_req_id = 9
    client = world.make("a", (1, 2))

    def put_and_notify() -> None:
        client.pending.append((9, 1))
        world.managers["a"].notify()

    world.spawn("other", world.wait_until_terminate)
    world.spawn("sender", put_and_notify)
    world.wait_until_terminate()
    if world.scheduler.forced_moves:
        world.wrong("the worker ended only when its idle time was over")
    if client.ended != {1: [""]}:
        world.wrong(f"the terminate request did not drain: {client.ended}")


@scenario
def a_wait_with_a_timeout(world: InterleavedWorld) -> None:
    world.make("a", (1, 1))
    world.spawn("other", world.shutdown)
    before = world.scheduler.clock.monotonic()
    if not world.wait_until_terminate(timeout=1.0) and world.scheduler.clock.monotonic() < before + 1.0:
        world.wrong("wait_until_terminate gave up before its time")


# ---------------------------------------------------------------------- readers


def readers_count_requests(world: InterleavedWorld) -> None:
    """With two slots and four requests, each count of live requests that a reader gets was right at some time."""
    client, all_done = world.client("a"), world.event()
    client.gives_all = True
    client.on_send = lambda *_: all_done.set() if len(client.ended) == 4 else None
    world.make("a", (1, 1), (2, 1), (3, 1), (4, 1), max_num_sequences=2)
    manager = world.managers["a"]

    def by_health() -> int:
        health = manager.health()
        if health["is_hanging"] or health["seconds_in_activity"] < 0:
            world.wrong(f"health says {health}")
        return health["active_requests"] + health["queued_requests"]

    def read(ask: Callable[[], int]) -> None:
        accepted = client.num_polled
        finals = len(client.ended)
        count = ask()
        most = len(client.handed_over) - finals
        least = accepted - len(client.ended) - 1    # one may be uncounted while its final is sent
        if not least <= count <= most:
            world.wrong(f"{count} active requests; at least {least} are alive, at most {most}")

    def read_both() -> None:
        read(lambda: manager.num_active_requests)
        read(by_health)

    world.spawn("reader", read_both)
    all_done.wait()
    world.shutdown()


add("readers_count_requests", readers_count_requests, LINES_OF_THE_LOOP)


@scenario
def the_watchdog_watches(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 1), hang_warning_s=1000.0)
    world.shutdown(drain=False)


# ---------------------------------------------------------------------- the interpreter ends


@scenario
def the_interpreter_ends(world: InterleavedWorld) -> None:
    world.make("a", (1, 3))
    world.interpreter_exit()


@scenario
def the_interpreter_ends_while_another_thread_shuts_down(world: InterleavedWorld) -> None:
    world.make_busy("a", (1, 2))
    world.spawn("other", world.shutdown)
    world.interpreter_exit()


SCENARIOS["the_list_of_workers_is_read/lines"] = Scenario(
    the_interpreter_ends_while_another_thread_shuts_down, frozenset({weakref.__file__}))


@scenario
def the_interpreter_ends_with_a_manager_that_ends_by_itself(world: InterleavedWorld) -> None:
    world.terminate_req_id = 9
    world.make("a", (1, 1), (9, 1))
    world.make("b", (2, 2))
    world.interpreter_exit()


@scenario
def the_interpreter_ends_while_another_thread_makes_a_manager(world: InterleavedWorld) -> None:
    def make() -> None:
        try:
            world.make("a", (1, 2))
        except ManagerClosedError:
            if "a" in world.clients and world.clients["a"].open:
                world.wrong("the constructor refused, and had taken requests")

    world.spawn("other", make)
    world.interpreter_exit()


# ---------------------------------------------------------------------- the constructor fails


class NoMoreThreads(RuntimeError):
    pass


def make_and_fail(world: InterleavedWorld, error: type[BaseException], **options: float) -> None:
    started = world.scheduler.clock.monotonic()
    try:
        world.make("a", (1, 2), **options)
    except error:
        if world.scheduler.clock.monotonic() >= started + SECONDS_TO_STOP_AFTER_A_TIMEOUT:
            return    # as after a shutdown that timed out: the worker ends later; `InterleavedWorld.close` checks it
        client = world.clients["a"]
        client.over = "the constructor raised"
        if client.open:
            world.wrong(f"the constructor raised, and {client.open} have had no final")
    else:
        world.wrong("the constructor did not raise")


@scenario
def the_worker_cannot_be_started(world: InterleavedWorld) -> None:
    def refuse(thread: Thread) -> None:
        if "worker" in thread.name:
            raise NoMoreThreads

    world.threading.before_start = refuse
    make_and_fail(world, NoMoreThreads)


@scenario
def the_watchdog_cannot_be_started(world: InterleavedWorld) -> None:
    def refuse(thread: Thread) -> None:
        if "watchdog" in thread.name:
            raise NoMoreThreads

    world.threading.before_start = refuse
    make_and_fail(world, NoMoreThreads, hang_warning_s=1000.0)


@scenario
def an_interrupt_comes_when_the_worker_has_started(world: InterleavedWorld) -> None:
    def interrupt(thread: Thread) -> None:
        if "worker" in thread.name:
            raise KeyboardInterrupt

    world.threading.after_start = interrupt
    make_and_fail(world, KeyboardInterrupt, hang_warning_s=1000.0)


# ---------------------------------------------------------------------- two managers


@scenario
def two_managers_end_each_other(world: InterleavedWorld) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        client, gate = world.client(name), world.event()
        client.on_get = gate.wait
        client.on_send = lambda *_, other=other: world.managers[other].shutdown(drain=False)
        world.make(name, (1, 1))
        client.gate = gate
    for client in world.clients.values():
        client.gate.set()
    for name in "ab":
        world.shutdown(name)


@scenario
def one_of_two_managers_ends(world: InterleavedWorld) -> None:
    world.make("a", (1, 1))
    world.make("b", (2, 1))
    world.shutdown("a", drain=False)
    world.shutdown("b")
