"""The suites of a campaign. A suite is a module with `run(Options) -> Summary`, and a line in SUITES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line.

    tier         Q, F or C: the amount of work
    first_seed   the first seed that each suite runs
    seconds      time limit of a suite; None: the suite runs until the work of the tier is done
    jobs         number of processes
    """

    tier: str
    first_seed: int = 0
    seconds: float | None = None
    jobs: int = 2


@dataclass(slots=True)
class Summary:
    """The result of a suite.

    ran        one line for tests/CAMPAIGNS.md: seeds and counts
    failures   violations, each with the command that repeats it
    short      lines that say what the suite did less of than the tier requires
    ran_on     lines with the kinds of cases and the number of each
    """

    ran: str
    failures: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    ran_on: list[str] = field(default_factory=list)


# name -> module. A module is imported when it runs, so that a suite does not need the imports of other suites.
SUITES: dict[str, str] = {
    "T1": "tests.campaigns.simulation",
    "T2": "tests.campaigns.blocks",
    "T3": "tests.campaigns.deterministic",
    "T4": "tests.campaigns.faults",
    "T5": "tests.campaigns.request_fuzzing",
    "T6": "tests.campaigns.checkpoints",
    "T7": "tests.campaigns.soak",
    "T10": "tests.campaigns.interleavings",
    "T14": "tests.campaigns.branch_coverage",
    "T14-mutants": "tests.campaigns.mutants",
    "T16": "tests.campaigns.safety_cost",
    "T17": "tests.campaigns.run_ahead",
    "T18": "tests.campaigns.ahead_of_time",
    "T19": "tests.campaigns.event_loop",
    "T20": "tests.campaigns.matrix",
    "T21": "tests.campaigns.adapters",
    "T22": "tests.campaigns.many_adapters",
    "T23": "tests.campaigns.drawing",
    "T24": "tests.campaigns.tool_calls",
    "T25": "tests.campaigns.disk_caches",
    "T26": "tests.campaigns.two_engines",
}


def suite(name: str) -> Callable[[Options], Summary]:
    return import_module(SUITES[name]).run
