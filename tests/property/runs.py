"""Runs scenarios, and says how to repeat one that went wrong."""

import re
from collections import Counter

from .planning_run import PlanningRun
from .scenario import Scenario, random_scenario
from .shrink import shrunk


def complaint(scenario: Scenario) -> str | None:
    """What goes wrong in a scenario, in words; None when nothing does."""
    try:
        PlanningRun(scenario).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_seed(seed: int) -> Counter[str]:
    """What happened in the run of a seed, counted.

    Raises AssertionError with the smallest scenario found that goes wrong in the same way.
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
