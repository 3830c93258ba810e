"""T7: up to ten million requests through long-lived engines. Each process is checked at every idle point.

Each of the `--jobs` processes runs all kinds of engines. The growth of a process' memory is judged by its own requests.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.soak import idle
from tests.soak.verdict import BOUNDS, Verdict, judge, table

from .registry import Options, Summary

# tier -> (requests over all processes, requests between two idle points)
ENOUGH = {"Q": (20_000, 250), "F": (1_000_000, 2_500), "C": (10_000_000, 10_000)}


def run(options: Options) -> Summary:
    items, items_a_round = ENOUGH[options.tier]
    jobs = 1 if options.tier == "Q" else options.jobs
    seeds = range(options.first_seed, options.first_seed + jobs)
    with tempfile.TemporaryDirectory() as folder:
        commands = {seed: [sys.executable, "-m", "tests.soak", "--seed", str(seed), "--items", str(-(-items // jobs)),
                           "--items-a-round", str(items_a_round), "--tier", options.tier] for seed in seeds}
        limit = [] if options.seconds is None else ["--seconds", str(options.seconds)]
        files = {seed: Path(folder) / f"samples of {seed}" for seed in seeds}
        children = {seed: subprocess.Popen([*command, *limit, "--out", str(files[seed])], stdout=subprocess.DEVNULL,
                                           stderr=subprocess.PIPE, text=True) for seed, command in commands.items()}
        errors = {seed: child.communicate()[1] for seed, child in children.items()}
        summary, done = Summary(""), 0
        for seed, child in children.items():
            again = " ".join(["python", *commands[seed][1:]])
            if child.returncode not in (0, 1) or errors[seed]:
                summary.failures.append(f"seed {seed}: exit status {child.returncode} ({again})\n{errors[seed]}")
                continue
            samples = [json.loads(line) for line in files[seed].read_text().splitlines()]
            verdict = judge(samples, BOUNDS[options.tier])
            summary.failures += [f"seed {seed}: {wrong} ({again})" for wrong in verdict.wrong]
            summary.short += [f"seed {seed}: {short}" for short in verdict.short]
            done += samples[-1]["counts"]["items"]
            summary.ran_on += [f"process of seed {seed}:", *table(Verdict(figures=verdict.figures)).splitlines()]
    if options.tier != "Q":
        summary.ran_on += ["an idle manager:", *(f"{name:>52}  {figure}" for name, figure in idle.measure().items())]
    summary.ran = f"T7: seeds {seeds[0]}..{seeds[-1]}: {done:,} requests in {jobs} processes"
    if done < items:
        summary.short.append(f"{done:,} of {items:,} requests")
    return summary
