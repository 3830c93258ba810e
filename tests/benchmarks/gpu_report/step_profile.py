"""A step by kernel: how often each kernel runs, how long it takes, and the gaps between kernels."""

from collections.abc import Iterator

import numpy as np

from .bench import Bench
from .device_clock import DeviceActivity
from .engines import Engine, engine, watch
from .records import Record
from .shapes import QWEN3_600M

BATCH, CONTEXT, STEPS, WATCHED_STEPS = 256, 900, 40, 20
KV_TOKENS = BATCH * (CONTEXT + 4 * STEPS + 300)
SECONDS = 20            # estimate; the kernels have been compiled before
MOST_KERNELS, NAME_LENGTH = 20, 80
QUANTILES = (10, 50, 90, 99)


def run(bench: Bench) -> Iterator[Record]:
    bench.require(SECONDS)
    batch, context, steps, watched = bench.pick((BATCH, CONTEXT, STEPS, WATCHED_STEPS), (2, 4, 3, 1))
    with engine(bench, QWEN3_600M, max_batch=BATCH, kv_tokens=KV_TOKENS) as made:
        step = made.generate(batch, context, steps).step_seconds(batch)
        activity = watch(bench, made, batch, context, watched)
        yield from by_kernel(made, f"{BATCH} of {CONTEXT} tokens", activity, watched, step)


def by_kernel(made: Engine, case: str, activity: DeviceActivity, steps: int, step_seconds: float) -> Iterator[Record]:
    """Yield the share of each kernel, and of the gaps between kernels, in the time of a step.

    activity       of `steps` steps
    step_seconds   time of a step that is not watched
    """
    def record(what: str, seconds: float, figures: str) -> Record:
        return Record("profile", f"{made.label}, {made.shape.name}, {case}: {what}", seconds / steps * 1e6,
                      step_seconds * 1e6, "us", note=made.note, figures=figures)

    kernels = sorted(activity.kernels.items(), key=lambda one: -one[1][1])
    for name, (count, seconds) in kernels[:MOST_KERNELS]:
        yield record(name[:NAME_LENGTH].replace("|", "/"), seconds,
                     f"{count / steps:.4g} a step, {seconds / count * 1e6:.2f} us each")
    others = [one for _, one in kernels[MOST_KERNELS:]]
    if others:
        yield record("other kernels", sum(seconds for _, seconds in others),
                     f"{sum(count for count, _ in others) / steps:.4g} a step")
    at = np.percentile(activity.gaps or (0.0,), QUANTILES) * 1e6
    yield record("gaps between kernels", sum(activity.gaps), "; ".join(
        f"{quantile} %: {gap:.2f} us" for quantile, gap in zip(QUANTILES, at, strict=True)))
