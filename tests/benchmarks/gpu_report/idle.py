"""Goal G4: idle time of the GPU between decode steps. Goal G8: gain from running ahead, and from two micro-batches."""

from collections.abc import Iterator
from typing import Any

from .bench import Bench
from .engines import Engine, Served, engine, joined, watch
from .records import Record
from .shapes import LLAMA_135M
from .step_profile import by_kernel

BATCH, CONTEXT, STEPS, WATCHED_STEPS = 256, 512, 200, 100
GOOD_IDLE_US = 20.0
KV_TOKENS = BATCH * (CONTEXT + 2 * STEPS)
LOAD_SECONDS, RUN_SECONDS, WATCH_SECONDS = 6, 2.5, 5           # estimates; the kernels have been compiled before


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    bench.require(LOAD_SECONDS + 2 * RUN_SECONDS)
    sizes = bench.pick((BATCH, CONTEXT, STEPS), (2, 4, 3))
    with engine(bench, LLAMA_135M, max_batch=BATCH, kv_tokens=KV_TOKENS, graphs=graphs, run_ahead=True) as made:
        ahead = [made.generate(*sizes) for _ in range(bench.pick(2, 1))]
        case = f"{made.label}, {BATCH} of {CONTEXT} tokens"
        bench.require(WATCH_SECONDS)
        yield from _idle(bench, made, case, ahead)
    rate, spread = _rate(ahead)
    lockstep, lockstep_spread, note = _other_mode(bench, made, graphs, run_ahead=False, max_batch=BATCH)
    yield Record("G8", case, rate, lockstep, "tokens/s", max(spread, lockstep_spread), note=note)
    rate, spread, note = _other_mode(bench, made, graphs, enable_trt_overlap=True, max_batch=BATCH // 2)
    yield Record("G8-overlap", case, rate, lockstep, "tokens/s", max(spread, lockstep_spread), note=note)


def _rate(runs: list[Served]) -> tuple[float, float]:
    """Return (largest tokens/s of the runs, spread as in `Record`)."""
    rates = [one.generation_rate() for one in runs]
    return max(rates), max(rates) / min(rates) - 1


def _other_mode(bench: Bench, ahead: Engine, graphs: bool, **options: Any) -> tuple[float, float, str]:
    """Measure a second engine, which has the engine options `options`. Return (tokens/s, spread, note).

    ahead   the first engine, which was made with run_ahead=True. If only one of the engines has graphs, the note
            says so
    """
    bench.require(LOAD_SECONDS + 2 * RUN_SECONDS)
    with engine(bench, LLAMA_135M, kv_tokens=KV_TOKENS, graphs=graphs, **options) as made:
        rate, spread = _rate([made.generate(*bench.pick((BATCH, CONTEXT, STEPS), (2, 4, 3)))
                              for _ in range(bench.pick(2, 1))])
        unlike = f"the other engine is {made.label}" if made.label != ahead.label else ""
        return rate, spread, joined(ahead.note, unlike, made.note if unlike else "")


def _idle(bench: Bench, made: Engine, case: str, runs: list[Served]) -> Iterator[Record]:
    """Yield records of the idle time: the time of an untraced step minus the busy time of a traced step."""
    batch, context, watched = bench.pick((BATCH, CONTEXT, WATCHED_STEPS), (2, 4, 1))
    times = [one.step_seconds(batch) for one in runs]
    activity = watch(bench, made, batch, context, watched)
    step, busy = min(times), activity.busy_seconds / watched
    idle, spread = max(step - busy, 0.0), max(times) / min(times) - 1
    yield Record("G4", case, idle * 1e6, GOOD_IDLE_US, "us", spread, note=made.note,
                 figures=f"a step takes {step * 1e3:.3f} ms")
    yield Record("G4-share", case, idle * 1e3, step * 1e3, "ms", spread, note=made.note)
    yield Record("fact", f"{made.label}: kernels of a decode step", activity.launches / watched)
    yield Record("fact", f"{made.label}: copies to the device in a decode step", activity.uploads / watched)
    yield from by_kernel(made, f"{BATCH} of {CONTEXT} tokens", activity, watched, step)
