"""tests/campaigns/safety_cost.py removes each check whose cost it measures, and can measure every cost.

The costs themselves are not tested, because they need a quiet machine."""

from contextlib import AbstractContextManager

import pytest

from tests.campaigns.safety_cost import cost, finite_costs, ledger_cost, new_loop, replacements, without


class NotingBlock:
    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __enter__(self) -> None:
        self.calls.append(1)

    def __exit__(self, *raised) -> None:
        pass


CHECKS = ["check_totals", "check_plan", "step output", "token ids", "guards", "heartbeat"]


def noting(calls: list, instead):
    """Return a wrapper of `instead`, a function or a context manager, that adds an entry to `calls` at each use."""
    if isinstance(instead, AbstractContextManager):
        return NotingBlock(calls)

    def note(*given, **options):
        calls.append(1)
        return instead(*given, **options)
    return note


def test_these_are_the_checks():
    assert list(replacements(new_loop(1))) == CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_what_stands_in_for_a_check_is_what_the_loop_calls(check):
    loop, calls = new_loop(8), []
    replaced = [(where, name, noting(calls, instead)) for where, name, instead in replacements(loop)[check]]
    with without(replaced):
        loop.step(accept_new=True)
    assert calls, f"{check} is not called in a step"
    called = len(calls)
    loop.step(accept_new=True)
    assert len(calls) == called, "it is back"
    loop.backend.close()


def test_every_cost_can_be_measured():
    costs = [cost("check_plan", 10), ledger_cost(10), *finite_costs(10).values()]
    assert all(abs(taken.by_decile) < 1e6 for taken in costs)
