"""Try one checkpoint of the fuzzer again: python -m tests.checkpoints.replay KEY [--folder FOLDER]

The program prints the verdict of the tests' rules, what batch_manager made of the checkpoint, and all errors. It keeps
the folder, so that its files can be inspected.
"""

import argparse
import sys
from pathlib import Path

from . import adapter_cases, adapter_rules, gguf_rules
from .cases import ADAPTER, case
from .rules import judge
from .trial import Bench, num_bytes, whole_way

FOLDER = Path("/tmp/damaged-checkpoint")


def command(key: str) -> str:
    """The command that replays a key."""
    return f"python -m tests.checkpoints.replay {key}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("key", help="a seed, or cut-N for a truncation, or another of cases.py")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where the files go; {FOLDER} if not given")
    options = parser.parse_args(arguments)
    files = case(options.key)
    bench = Bench(options.folder)
    counts = bench.run([options.key])
    wrong = counts.failed[0][1] if counts.failed else []
    wrong += [found for found in bench.resources(options.key) if found not in wrong]
    path = bench.path_of(options.key)
    outcome = bench.outcome_of(options.key)
    if options.key.startswith(ADAPTER):
        verdict = adapter_rules.judge(adapter_cases.damaged(int(options.key.removeprefix(ADAPTER)))[0], files)
    else:
        wrong += [found for found in whole_way(path, outcome) if found not in wrong]
        verdict = judge(files) if path == options.folder else gguf_rules.verdict(path.read_bytes())
    print(f"{options.folder}: {', '.join(sorted(files))}; {num_bytes(files):,} bytes")
    print(f"the rules say: {verdict!r:.300}")
    print(f"the product says: {outcome!r:.600}")
    print("\n".join(f"WRONG: {found}" for found in wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
