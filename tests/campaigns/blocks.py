"""T2: operations of the block manager in random order, compared with a model. Odd seeds use block digests of 4 bits.

    python -m tests.campaigns.blocks SEED        repeats one seed, shrunk to the fewest operations that fail
"""

import itertools
import sys
from collections import Counter

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kv.block_machine import BlockMachine, MachineOfFourBits, MachineOfFullDigests

from .portions import each_done
from .registry import Options, Summary

# tier -> (rule calls, look-ups among digests of four bits)
ENOUGH = {"Q": (20_000, 4_000), "F": (500_000, 100_000), "C": (10_000_000, 2_000_000)}
RULES = ("allocate", "extend", "draft", "reorder", "look_up", "commit", "free", "double_free", "evict", "fail_nth",
         "salt", "clear", "strangers")
RUNS_OF_A_SEED, RULES_OF_A_RUN = 100, 50
LOOK_UPS = "look-ups among digests of four bits"


def run_seed(number: int, shrinks: bool = False) -> tuple[Counter[str], str | None]:
    """Run the seed `number`. Returns (number of calls of each rule, text of the failure or None).

    If `shrinks` is True, a failure is shrunk to the fewest operations.
    """
    machine = (MachineOfFullDigests, MachineOfFourBits)[number % 2]
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    BlockMachine.calls.clear()
    wrong = None
    try:
        run_state_machine_as_test(seed(number)(machine), settings=settings(
            max_examples=RUNS_OF_A_SEED, stateful_step_count=RULES_OF_A_RUN, deadline=None, database=None,
            phases=phases, suppress_health_check=list(HealthCheck)))
    except Exception as error:
        wrong = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    counts = Counter(BlockMachine.calls)
    if machine is MachineOfFourBits:
        counts[LOOK_UPS] = counts["look-ups"]
    return counts, wrong


def run(options: Options) -> Summary:
    calls, look_ups = ENOUGH[options.tier]
    counts: Counter[str] = Counter()
    failures, number, seeds = [], options.first_seed, ((number,) for number in itertools.count(options.first_seed))
    for (number,), (did, wrong) in each_done(
            run_seed, seeds, options,
            lambda: sum(counts[rule] for rule in RULES) >= calls and counts[LOOK_UPS] >= look_ups):
        counts.update(did)
        if wrong is not None:
            failures.append(f"seed {number} (python -m tests.campaigns.blocks {number}):\n{wrong}")
    done = sum(counts[rule] for rule in RULES)
    short = []
    if done < calls:
        short.append(f"{done:,} of {calls:,} rule calls")
    if counts[LOOK_UPS] < look_ups:
        short.append(f"{counts[LOOK_UPS]:,} of {look_ups:,} {LOOK_UPS}")
    return Summary(
        f"T2: seeds {options.first_seed}..{number}: {done:,} rule calls ("
        + ", ".join(f"{counts[rule]:,} {rule}" for rule in RULES)
        + f"), {counts['look-ups']:,} look-ups, {counts[LOOK_UPS]:,} of them among digests of four bits, "
        f"{counts['blocks found']:,} blocks found, {counts['forks']:,} forks", failures, short)


if __name__ == "__main__":
    _, wrong = run_seed(int(sys.argv[1]), shrinks=True)
    print(wrong or "nothing is wrong")
    sys.exit(1 if wrong else 0)
