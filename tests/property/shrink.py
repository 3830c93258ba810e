"""Shrinks a scenario step by step, as long as it still fails."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .scenario import Options, RequestPlan, Scenario


def shrunk(scenario: Scenario, is_wrong: Callable[[Scenario], bool]) -> Scenario:
    """Return a scenario with fewer and shorter requests and fewer features, for which `is_wrong` still holds."""
    moved = True
    while moved:
        moved = False
        for smaller in _smaller(scenario):
            widest = max(plan.beam_width for plan in smaller.requests)
            if widest <= smaller.options.max_beam_width and is_wrong(smaller):
                scenario, moved = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    requests = scenario.requests
    for place in range(len(requests)):
        if len(requests) > 1:
            yield replace(scenario, requests=requests[:place] + requests[place + 1:])
    for name, value in _changes(scenario.options, Options()):
        yield replace(scenario, options=replace(scenario.options, **{name: value}))
    plainest = RequestPlan(0, (0,), 1)
    for place, plan in enumerate(requests):
        candidates = [replace(plan, **{name: value}) for name, value in _changes(plan, plainest)
                      if name not in ("prompt", "max_new_tokens", "arrival", "token_extra_ids")]
        if plan.token_extra_ids is not None:
            candidates.append(replace(plan, token_extra_ids=None))
        elif len(plan.prompt) > 1:
            candidates.append(replace(plan, prompt=plan.prompt[:-1]))
        if plan.max_new_tokens > 1:
            candidates.append(replace(plan, max_new_tokens=plan.max_new_tokens - 1))
        if plan.arrival:
            candidates.append(replace(plan, arrival=plan.arrival - 1))
        for candidate in candidates:
            yield replace(scenario, requests=(*requests[:place], candidate, *requests[place + 1:]))


def _changes(value: object, plain: object) -> Iterator[tuple[str, object]]:
    for column in fields(value):
        if getattr(value, column.name) != getattr(plain, column.name):
            yield column.name, getattr(plain, column.name)
