"""Which suites a campaign can run. A new one is a module with `run(Options) -> Summary`, and a line in SUITES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    tier         Q, F or C: how much is enough
    first_seed   where to go on
    seconds      stop after so long, enough or not; None: when it is enough
    jobs         processes
    """

    tier: str
    first_seed: int = 0
    seconds: float | None = None
    jobs: int = 2


@dataclass(slots=True)
class Summary:
    """What a suite did.

    ran        one line for tests/CAMPAIGNS.md: seeds and counts
    failures   what is wrong, each with the command that shows it again
    short      what was not reached as often as the tier asks for
    ran_on     lines that say what kinds of cases there were, and how many of each
    """

    ran: str
    failures: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    ran_on: list[str] = field(default_factory=list)


# name -> module; imported when it runs, so that one suite does not pay for another's imports
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
}


def suite(name: str) -> Callable[[Options], Summary]:
    return import_module(SUITES[name]).run
