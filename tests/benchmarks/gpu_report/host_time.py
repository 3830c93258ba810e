"""Goals G5 and G5b: host time of an iteration with 256 requests, around a model that takes no time."""

from collections.abc import Iterator

from batch_manager.tools.host_bench import Setting, measure

from .bench import Bench
from .records import Record

BATCH, ITERATIONS = 256, 300


def run(bench: Bench) -> Iterator[Record]:
    for goal, streaming, good_us in (("G5", True, 500.0), ("G5b", False, 150.0)):
        bench.require(4)
        found = measure(Setting(batch=bench.pick(BATCH, 2), iterations=bench.pick(ITERATIONS, 3), streaming=streaming,
                                policy="max_utilization"))["host_us"]
        yield Record(goal, f"{BATCH} requests, one core of this host", found["median"], good_us, "us",
                     figures=f"p99 {found['p99']} us")
