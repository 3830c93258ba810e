"""T17: the responses of an engine that runs ahead equal those of an engine in lockstep, bit by bit.

    python -m tests.campaigns.run_ahead SEED             repeats one seed and prints each difference with its scenario

A pair is the responses to one request in both engines: all tensors, in order. A seed chooses a scenario: an engine and
requests with any features. The engine has the scripted model, or `deterministic` and a small checkpoint of random
weights. The scenario runs once in lockstep and twice with run-ahead on a device that is late: once without faults, and
once with steps that fail after the next step was launched. Some requests are stopped.

If a stop ends a request early, or a fault in the request's row does, the output must be the beginning of the request's
output in lockstep. Such a request does not count as a pair. A run in which no step was launched ahead counts no pairs.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")     # waiting threads sleep; spinning takes minutes on busy cores

import logging
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

from batch_manager.names import FinishReason
from tests.deterministic.differential import FAMILIES
from tests.run_ahead.engines import Ahead, Response, Run, run_ahead, run_in_lockstep
from tests.run_ahead.late_backend import Faults
from tests.run_ahead.scenarios import FEATURES, SCRIPTED, RunAheadScenario, draw_scenario

from .portions import run_seeds
from .registry import Options, Summary

ENOUGH = {"Q": 300, "F": 10_000, "C": 100_000}                    # pairs
PAIRS_OF_A_FEATURE = {"Q": 0, "F": 100, "C": 1_000}
SHARE_OF_A_KIND = 0.25                                            # least share of the native and of the scripted pairs
SEEDS_A_PORTION = 6
COUNTS = ("pairs", "native", "scripted", "beginnings", "tokens", "discarded", "steps", "ahead", "pauses", "void",
          "failed steps")
CODES_OF_FAULTS = ("[MODEL_ERROR]", "[NON_FINITE_LOGITS]")
WORLD_FEATURES = (SCRIPTED, *FAMILIES, "max utilization", "no evict", "split", "fused", "chunks in order",
                  "chunks alike", "reuse", "host blocks", "window", "sinks", "greedy",
                  *dict.fromkeys(FEATURES.values()))


def draw_runs(scenario: RunAheadScenario) -> list[Ahead]:
    """Return the settings of a scenario's two run-ahead runs: first without faults, then with faults."""
    draw = Random(f"runs ahead {scenario.seed}")

    def new(fault_rate: float, stops: dict[int, int]) -> Ahead:
        return Ahead(draw.getrandbits(32), fault_rate, draw.choice([0.0, 0.0, 0.5, 1.0]), stops,
                     own_queue=scenario.is_scripted and draw.random() < 0.5)

    stops = {request_id: ask.arrival + draw.randint(0, 25) for request_id, ask in scenario.asks.items()
             if draw.random() < 0.08}
    return [new(0.0, draw.choice([{}, stops])), new(draw.choice([0.05, 0.15, 0.3, 0.5]), stops)]


def run_seed(seed: int, parent: Path, family: str | None = None) -> tuple[Counter, list[str]]:
    """Run the scenario of one seed. Returns (counts, differences). If `family` is None, the seed chooses the family."""
    scenario, counts, found = draw_scenario(seed, family), Counter(scenarios=1), []

    def note(what: str) -> None:
        counts["different"] += 1
        found.append(f"seed {seed} (python -m tests.campaigns.run_ahead {seed}): {what}")

    try:
        lockstep = run_in_lockstep(scenario, parent)
    except Exception as error:
        note(f"in lockstep: {where(error)}; {scenario}")
        return counts, found
    for ahead in draw_runs(scenario):
        try:
            run, faults = run_ahead(scenario, parent, ahead)
        except Exception as error:
            note(f"{where(error)}; {ahead}; {scenario}")
            continue
        if not run.counts["ahead"]:
            counts["runs that were never ahead"] += 1
            continue
        differences = compare(scenario, ahead, lockstep, run, faults, counts)
        counts.update({name: run.counts[name] for name in
                       ("steps", "ahead", "pauses", "void", "discarded", "failed steps")})
        if differences:
            note(f"{differences}; {ahead}; {scenario}")
    return counts, found


def where(error: Exception) -> str:
    """Return a description of an exception and its last three stack frames, on one line."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__}: {error} at " + " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def compare(scenario: RunAheadScenario, ahead: Ahead, lockstep: Run, run: Run, faults: Faults,
            counts: Counter) -> list[str]:
    """Return the differences between `run`, a run with run-ahead, and `lockstep`, and add the pairs to `counts`.

    faults   the faults that occurred in `run`
    """
    differences, failed, cut, early, kind = [], 0, 0, 0, "scripted" if scenario.is_scripted else "native"
    for request_id, ask in scenario.asks.items():
        expected, got = lockstep.responses[request_id], run.responses[request_id]
        if len(expected) == len(got) and all(map(Response.same, expected, got)):
            if not expected[-1].error:                            # the request was not refused
                counts.update(pairs=1, **{kind: 1}, tokens=sum(map(num_tokens, got)))
                counts.update(("of", feature) for feature in (*scenario.features(), *ask.features))
                reason = FinishReason(int(got[-1].tensors["finish_reason"][0, 0]))
                counts["end", reason.name] += 1
                early += ask.beam_width * (reason is not FinishReason.LENGTH)
            continue
        last = got[-1]
        if last.error.startswith(CODES_OF_FAULTS):
            failed += 1
            got = got[:-1]
        elif not (request_id in ahead.stops and not last.error
                  and last.tensors["finish_reason"][0, 0] == FinishReason.CANCELLED):
            differences.append(f"request {request_id} ({', '.join(ask.features)}): {how(expected, got)}")
            continue
        cut += ask.beam_width
        if ask.beam_width == 1 and not expected[-1].error and not is_beginning(got, expected, scenario.vocab):
            differences.append(f"request {request_id} ({', '.join(ask.features)}) is cut short: {how(expected, got)}")
        counts["beginnings"] += 1
    if failed > faults.alone:
        differences.append(f"{failed} requests failed, of which faults explain {faults.alone}")
    if run.counts["discarded"] > early + cut + run.counts["void"]:
        differences.append(f"{run.counts['discarded']} tokens were discarded; {early} sequences ended early, {cut} "
                           f"were cut short and {run.counts['void']} rows were void")
    if run.counts["failed steps"] and not ahead.fault_rate:
        differences.append(f"{run.counts['failed steps']} steps failed, and none was to")
    if not cut and not any(ask.beam_width > 1 for ask in scenario.asks.values()) and (
            lockstep.counts["generated"] != run.counts["generated"]):
        differences.append(f"the statistics count {run.counts['generated']} tokens, "
                           f"{lockstep.counts['generated']} in lockstep")
    return differences


def num_tokens(response: Response) -> int:
    return 0 if response.error else int(response.tensors["sequence_length"].sum())


def how(expected: list[Response], got: list[Response]) -> str:
    """Return the first difference of two lists of responses, as text."""
    for number, (one, other) in enumerate(zip(expected, got)):
        if not one.same(other):
            names = [name for name in one.tensors if name in other.tensors and (
                one.tensors[name].shape, one.tensors[name].tobytes()) != (
                other.tensors[name].shape, other.tensors[name].tobytes())]
            if one.error or other.error:
                return f"response {number} says {other.error!r}, {one.error!r} in lockstep"
            ids = [response.tensors["output_ids"].ravel().tolist() for response in (other, one)]
            return f"response {number} differs in {names}: tokens {ids[0]}, {ids[1]} in lockstep"
    return f"{len(got)} responses, {len(expected)} in lockstep"


def is_beginning(got: list[Response], expected: list[Response], vocab: int) -> bool:
    """Whether tokens, log-probs and logits of a request with one beam are the beginning of the expected ones."""
    return all(joined(expected, name, width).startswith(joined(got, name, width)) for name, width in (
        ("output_ids", 1), ("output_log_probs", 1), ("generation_logits", vocab)))


def joined(responses: list[Response], name: str, width: int) -> bytes:
    """Return the bytes of the tensor `name` of all responses, joined in order.

    A tensor that was not requested has a last dimension that is no multiple of `width`, and adds nothing.
    """
    return b"".join(np.ascontiguousarray(response.tensors[name]).tobytes() for response in responses
                    if not response.error and response.tensors[name].shape[-1] % width == 0)


def run_quietly(seed: int, parent: Path) -> tuple[Counter, list[str]]:
    logging.getLogger("batch_manager").setLevel(logging.CRITICAL)    # injected faults are logged
    return run_seed(seed, parent)


def run(options: Options) -> Summary:
    total, failures, last_seed = run_seeds(run_quietly, options, lambda total: is_enough(total, options.tier),
                                           SEEDS_A_PORTION)
    return Summary(summary_line(total, options.first_seed, last_seed), failures, short(total, options.tier),
                   ran_on(total))


def summary_line(total: Counter, first_seed: int, last_seed: int) -> str:
    return (f"T17: seeds {first_seed}..{last_seed}: {total['pairs']:,} pairs ({total['native']:,} over checkpoints, "
            f"{total['scripted']:,} scripted) and {total['beginnings']:,} requests cut short, {total['tokens']:,} "
            f"tokens, {total['discarded']:,} discarded; {total['ahead']:,} of {total['steps']:,} steps launched ahead, "
            f"{total['failed steps']:,} failed steps, {total['void']:,} void rows, {total['pauses']:,} pauses; "
            f"{total['runs that were never ahead']:,} runs were never ahead; {total['different']:,} different")


def ran_on(total: Counter) -> list[str]:
    of = [f"{total['of', name]:,} {name}" for name in WORLD_FEATURES]
    ends = [f"{count:,} {key[1]}" for key, count in sorted(
        item for item in total.items() if isinstance(item[0], tuple) and item[0][0] == "end")]
    return [f"pairs with: {', '.join(of)}", f"ends: {', '.join(ends)}"]


def is_enough(total: Counter, tier: str) -> bool:
    return total["pairs"] >= ENOUGH[tier] and min(total["native"], total["scripted"]) >= (
        SHARE_OF_A_KIND * ENOUGH[tier])


def short(total: Counter, tier: str) -> list[str]:
    lines = []
    if not is_enough(total, tier):
        lines.append(f"{total['pairs']:,} of {ENOUGH[tier]:,} pairs, {total['native']:,} of them over checkpoints")
    wanted = PAIRS_OF_A_FEATURE[tier]
    return lines + [f"{name}: {total['of', name]} of {wanted} pairs" for name in WORLD_FEATURES
                    if total["of", name] < wanted]


def main() -> int:
    seed = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as parent:
        counts, found = run_quietly(seed, Path(parent))
    print(*found, summary_line(counts, seed, seed), *ran_on(counts), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
