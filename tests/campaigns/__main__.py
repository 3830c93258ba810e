"""Long runs of the randomised suites.

    python -m tests.campaigns --tier F [--suite T1] [--first-seed N] [--seconds S] [--jobs 2]

A tier (Q, F or C) is an amount of work. Each suite runs seeds from --first-seed on, until it has done the work of the
tier or `--seconds` have passed. Seeds are consecutive, so --first-seed resumes a campaign. The last lines of the output
belong in tests/CAMPAIGNS.md. The exit status is 1 if a suite found a failure, and 0 otherwise, even if a suite did less
than the tier requires.
"""

import argparse
import subprocess
import sys
import time

from .registry import SUITES, Options, suite


def commit() -> str:
    """Return the name of the checked-out commit, followed by + if the working tree has uncommitted changes."""
    described = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=["Q", "F", "C"], default="F")
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="one of them only; may be repeated")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="for each suite; None: until it is enough")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    options = Options(arguments.tier, arguments.first_seed, arguments.seconds, arguments.jobs)

    wrong = False
    for name in arguments.suite or sorted(SUITES):
        started = time.monotonic()
        summary = suite(name)(options)
        for failure in summary.failures:
            print(failure)
        for line in summary.ran_on:
            print(line)
        for line in summary.short:
            print(f"short of tier {options.tier}: {line}")
        print(f"{commit()}: {summary.ran}; {len(summary.failures)} wrong; {time.monotonic() - started:.0f} s")
        wrong |= bool(summary.failures)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
