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
    "T1": "tests.campaign.simulation",
    "T2": "tests.campaign.blocks",
    "T3": "tests.campaign.deterministic",
    "T4": "tests.campaign.faults",
    "T5": "tests.campaign.request_fuzzing",
    "T6": "tests.campaign.checkpoints",
    "T7": "tests.campaign.soak",
    "T10": "tests.campaign.interleavings",
    "T14": "tests.campaign.coverage",
    "T14-mutants": "tests.campaign.mutants",
    "T16": "tests.campaign.safety_cost",
    "T17": "tests.campaign.run_ahead",
    "T18": "tests.campaign.ahead_of_time",
}


def suite(name: str) -> Callable[[Options], Summary]:
    return import_module(SUITES[name]).run
