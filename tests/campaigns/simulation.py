"""T1: consecutive seeds of the simulator, in several processes."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.faults import MENU
from tests.simulation.features import available
from tests.simulation.marker_names import MARKERS, NEEDS
from tests.simulation.replay import report, simulate
from tests.simulation.swarm import draw
from tests.simulation.traits import table, traits

from .portions import each_done
from .registry import Options, Summary

# tier -> (iterations, seeds, hits of each fault, visits of each marker)
ENOUGH = {"Q": (24_000, 100, 0, 0), "F": (5_000_000, 5_000, 1_000, 100), "C": (100_000_000, 100_000, 1_000, 100)}
SEEDS_A_PORTION = 10
REPORTS = 5


@dataclass(slots=True)
class Counts:
    """Sums over seeds. `failed` has (seed, report) of each seed with violations.

    of_them     "several ranks", "adapters", "drafts", "a draft model", "other engines" -> the iterations of engines
                with these
    """

    seeds: int = 0
    iterations: int = 0
    of_them: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    markers: Counter[str] = field(default_factory=Counter)
    traits: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        self.seeds += other.seeds
        self.iterations += other.iterations
        self.of_them += other.of_them
        self.requests += other.requests
        self.tokens += other.tokens
        self.hits += other.hits
        self.markers += other.markers
        self.traits += other.traits
        self.failed += other.failed


def portion(first_seed: int, count: int) -> Counts:
    """Run `count` seeds in this process, from `first_seed` on."""
    counts = Counts()
    for seed in range(first_seed, first_seed + count):
        result, swarm = simulate(seed), draw(seed, available())
        has = {"several ranks": swarm.ranks > 1, "adapters": swarm.adapters > 0, "drafts": swarm.drafts > 0,
               "a draft model": swarm.draft_model, "other engines": swarm.transfers is not None}
        counts.add(Counts(1, result.iterations, Counter({name: result.iterations for name in has if has[name]}),
                          result.requests, result.tokens, result.hits, result.markers, Counter(traits(swarm))))
        if result.violations:
            counts.failed.append((seed, report(result) if not counts.failed else "\n".join(result.violations)))
    return counts


def simulate_many(options: Options) -> Counts:
    """Run seeds from `options.first_seed` on, until the work of the tier is done or `options.seconds` have passed."""
    iterations, seeds, _, _ = ENOUGH[options.tier]
    counts = Counts()
    portions = ((seed, SEEDS_A_PORTION) for seed in itertools.count(options.first_seed, SEEDS_A_PORTION))
    for _, done in each_done(portion, portions, options,
                             lambda: counts.iterations >= iterations and counts.seeds >= seeds):
        counts.add(done)
    return counts


def run(options: Options) -> Summary:
    counts = simulate_many(options)
    last = options.first_seed + counts.seeds - 1
    failures = [f"seed {seed} (python -m tests.simulation.replay {seed}):\n{text}"
                for seed, text in counts.failed[:REPORTS]]
    failures += [f"seed {seed}: python -m tests.simulation.replay {seed}" for seed, _ in counts.failed[REPORTS:]]
    return Summary(
        f"T1: seeds {options.first_seed}..{last}: {counts.iterations:,} iterations "
        f"({', '.join(f'{number:,} with {name}' for name, number in counts.of_them.items())}), "
        f"{counts.requests:,} requests, {counts.tokens:,} tokens, {sum(counts.hits.values()):,} faults; "
        f"features: {', '.join(sorted(available())) or 'none of the optional ones'}",
        failures, short(counts, options.tier), table(counts.traits))


def short(counts: Counts, tier: str) -> list[str]:
    """Return a line for each fault and marker that occurred less often than the tier requires.

    If a fault or marker needs a feature that the engine does not have, the line names the feature.
    """
    iterations, seeds, hits, visits = ENOUGH[tier]
    lines = []
    if counts.iterations < iterations or counts.seeds < seeds:
        lines.append(f"{counts.iterations:,} of {iterations:,} iterations, {counts.seeds:,} of {seeds:,} seeds")
    needs = {name: fault.needs for name, fault in MENU.items()} | NEEDS
    for names, met, wanted in ((MENU, counts.hits, hits), (MARKERS, counts.markers, visits)):
        for name in names:
            missing = needs.get(name) and needs[name] not in available()
            if missing:
                lines.append(f"{name}: not possible, the engine has no {needs[name]} yet")
            elif met[name] < wanted:
                lines.append(f"{name}: {met[name]} of {wanted}")
    return lines
