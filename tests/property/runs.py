"""Runs scenarios, and reports a failing one in its smallest form."""

import re
from collections import Counter

from .planning_run import PlanningRun
from .scenario import Scenario, random_scenario
from .shrink import shrunk


def complaint(scenario: Scenario) -> str | None:
    """Run a scenario. Returns its error as text, or None."""
    try:
        PlanningRun(scenario).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_seed(seed: int) -> Counter[str]:
    """Run the random scenario of a seed. Returns the number of each kind of event.

    If the run fails, the scenario is shrunk while it fails with the same kind of error. The AssertionError that is
    raised names the smallest scenario.
    """
    scenario = random_scenario(seed)
    try:
        return PlanningRun(scenario).run()
    except Exception as error:
        kind = _kind(f"{type(error).__name__}: {error}")
        smallest = shrunk(scenario, lambda smaller: _kind(complaint(smaller) or "") == kind)
        raise AssertionError(f"seed {seed}: {error}\nshrunk: {complaint(smallest)}\n{smallest}") from error


def _kind(text: str) -> str:
    return re.sub(r"\d+", "", text)[:60]
