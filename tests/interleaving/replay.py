"""Runs a schedule again and prints every yield point: python -m tests.interleaving.replay SCENARIO [SCHEDULE]

A failure prints its SCHEDULE. The schedule `3:worker,17:clock` chooses the worker at decision 3, the clock at decision
17, and the default at all other decisions.
"""

import argparse
import sys

from .explore import from_text, run
from .plants import PLANTS, planted
from .scenarios import SCENARIOS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interleaving.replay", description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("schedule", nargs="?", default="", type=from_text)
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a bug to plant before")
    options = parser.parse_args(arguments)
    with planted(options.plant):
        done = run(options.scenario, options.schedule, with_log=True)
    print("\n".join(done.log))
    print("\n".join(done.violations) or "nothing is wrong")
    return 1 if done.violations else 0


if __name__ == "__main__":
    sys.exit(main())
