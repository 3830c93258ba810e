"""Runs one seed again and draws its schedule: python -m tests.simulation.replay SEED [--last N] [--history FILE]"""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from batch_manager.stats.trace import IterationTrace
from batch_manager.tools.draw.text import render_text

from .features import available
from .history import to_line
from .swarm import Swarm, draw
from .world import Result, SimulatedWorld

LAST_ITERATIONS = 40


def simulate(seed: int, *, iterations: int | None = None, trace: list[IterationTrace] | None = None,
             history: list | None = None) -> Result:
    """Run one seed, with the seed's number of iterations if `iterations` is None. See SimulatedWorld."""
    return SimulatedWorld(draw(seed, available(), iterations), trace=trace, history=history).run()


def command(seed: int) -> str:
    """Return the command that replays a seed."""
    return f"python -m tests.simulation.replay {seed}"


def report(result: Result) -> str:
    """Return the violations, the command that replays the seed and the picture of the schedule, as text."""
    trace: list[IterationTrace] = []
    simulate(result.seed, trace=trace)
    return "\n".join([f"seed {result.seed}:", *(f"  {violation}" for violation in result.violations),
                      f"again: {command(result.seed)}", picture(trace)])


def picture(trace: list[IterationTrace], last: int = LAST_ITERATIONS) -> str:
    """Draw the last `last` iterations of a trace as text, with the requests that ran in them."""
    trace = trace[-last:]
    ran = {request_id for row in trace for request_id in (*(chunk[0] for chunk in row.context), *row.generation,
                                                          *row.paused)}
    rows = [replace(row, finished=tuple(filter(ran.__contains__, row.finished)),
                    arrived=tuple(filter(ran.__contains__, row.arrived))) for row in trace]
    return render_text(rows, legend=False) if rows else "(no iteration ran)"


def describe(swarm: Swarm) -> str:
    return "\n".join(f"  {field.name:<20} {getattr(swarm, field.name)}" for field in fields(swarm))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--iterations", type=int, help="instead of those the seed says")
    parser.add_argument("--last", type=int, default=LAST_ITERATIONS, help="iterations in the picture")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write the calls for tests.simulation.history")
    options = parser.parse_args(arguments)

    swarm = draw(options.seed, available(), options.iterations)
    trace, history = [], []
    result = SimulatedWorld(swarm, trace=trace, history=history).run()
    print(f"seed {swarm.seed}\n{describe(swarm)}\n{picture(trace, options.last)}")
    for counts in (result.hits, result.markers):
        print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"{result.iterations} iterations, {result.requests} requests, {result.tokens} tokens, digest {result.digest}")
    print("\n".join(result.violations) or "nothing is wrong")
    if options.history:
        model = {"vocab_size": swarm.vocab_size, "key": swarm.seed, "window": swarm.window, "sink": swarm.sinks,
                 "max_seq_len": swarm.max_seq_len, "is_static": swarm.is_static}
        options.history.write_text("\n".join([json.dumps(model), *map(to_line, history)]) + "\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
