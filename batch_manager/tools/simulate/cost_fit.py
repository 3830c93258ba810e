"""Fit a cost model on traces of real runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...stats.trace import IterationTrace
from ..bench.errors import InputError
from .cost_model import AMOUNTS, DISTINCT, GENERATION_TERMS, HOST_TERMS, MIXED_TERMS, CostModel, StepError, amount
from .least_squares import nonnegative_least_squares
from .measured_steps import MeasuredStep, measured_steps
from .step_shape import StepShape

FEWEST_STEPS = 50
HELD_OUT = 5            # every fifth step is held out, to measure the error
ROUNDS = 8
OUTLIER = 5.0           # times the median deviation; steps with a larger deviation count for the spread only
INTERRUPTION = 20.0     # times the predicted time; longer steps are ignored
SHORTEST_S = 1e-6
QUANTILES = 201         # number of quantiles of the spread


def fit_cost(traces: Iterable[Iterable[IterationTrace]], about: Mapping[str, Any] | None = None) -> CostModel:
    """Fit a cost model on the step times of traces.

    The time of a step is modelled as a sum of terms: a constant, and amounts of work, such as the number of context
    tokens, each multiplied by its seconds per unit. Steps with contexts have separate terms. The fit minimises relative
    errors by iteratively reweighted non-negative least squares (Lawson and Hanson), without outliers. All terms are
    then scaled so that the predicted and the measured times have the same sum. This sum includes outliers, but not
    steps that took more than 20 times the predicted time (INTERRUPTION). The model stores quantiles of measured
    time / predicted time.

    Published serving simulators such as Vidur (MLSys 2024) predict the time of each operator, and claim errors below
    9 % in end-to-end latency.

    about   fields that describe the origin of the traces; the fit adds its own fields

    Raises InputError for too few steps, or for traces of both synchronous and asynchronous engines.
    """
    steps: list[MeasuredStep] = []
    ways = set()
    num_blocks = 0
    for trace in traces:
        iterations = list(trace)
        num_blocks = max([num_blocks, *(each.live_blocks + each.cached_blocks + each.free_blocks
                                        for each in iterations)])
        found, is_asynchronous = measured_steps(iterations)
        steps += found
        ways.add(is_asynchronous)
    timed = [step for step in steps if step.step_s is not None]
    if len(timed) < FEWEST_STEPS:
        raise InputError(f"the traces have {len(timed)} timed steps; expected at least {FEWEST_STEPS}; "
                         "record a longer run with bench --trace")
    if len(ways) > 1:
        raise InputError("some of the traces are of an engine that launches a step before it reads the results of the "
                         "last one, and others are not; expected traces of one engine; fit the traces of each engine "
                         "separately")
    seen = [step for number, step in enumerate(timed) if number % HELD_OUT]
    held_out = timed[::HELD_OUT]
    model, _ = _fit(seen, steps)
    error = _error(model, held_out)
    model, interrupted = _fit(timed, steps)
    most = {name: max(getattr(step.shape, name) for step in timed) for name in AMOUNTS}
    return replace(model, most=most, is_asynchronous=ways.pop(), error=error, about={
        **(about or {}), "steps": len(timed), "interrupted_share": round(interrupted, 4), "num_blocks": num_blocks})


def _fit(timed: Sequence[MeasuredStep], steps: Sequence[MeasuredStep]) -> tuple[CostModel, float]:
    """Return (the model, share of the timed steps that were ignored as interrupted).

    timed   the steps whose time on the device is known; the device's terms are fitted to them
    steps   all steps; the host's terms are fitted to those whose time on the host is known
    """
    generation = [step for step in timed if not step.shape.context_requests]
    mixed = [step for step in timed if step.shape.context_requests]
    hosts = [step for step in steps if step.host_s is not None]
    of_generation = _fit_terms([step.shape for step in generation], [step.step_s for step in generation],
                               GENERATION_TERMS)
    of_mixed = _fit_terms([step.shape for step in mixed], [step.step_s for step in mixed], MIXED_TERMS)
    of_host = _fit_terms([step.shape for step in hosts], [step.host_s for step in hosts], HOST_TERMS)
    model = CostModel((of_generation or of_mixed).seconds, (of_mixed or of_generation).seconds, of_host.seconds,
                      generation_spread=(of_generation or of_mixed).spread,
                      mixed_spread=(of_mixed or of_generation).spread)
    return model, (of_generation.interrupted + of_mixed.interrupted) / len(timed)


@dataclass(frozen=True, slots=True)
class _Terms:
    """Fitted terms.

    seconds       term -> seconds per unit; has no terms of 0 seconds
    spread        quantiles of measured / predicted time, as `generation_spread` in CostModel
    interrupted   number of steps that were ignored because they took more than 20 times the predicted time
    """

    seconds: dict[str, float]
    spread: tuple[float, ...]
    interrupted: int

    def __bool__(self) -> bool:
        return bool(self.seconds)


def _fit_terms(shapes: Sequence[StepShape], seconds: Sequence[float | None], terms: Sequence[str]) -> _Terms:
    if not shapes:
        return _Terms({}, (), 0)
    if not any(shape.shared_tokens for shape in shapes):        # DISTINCT cannot be separated from cached_tokens
        terms = [term for term in terms if term != DISTINCT]
    columns = np.array([[amount(term, shape) for term in terms] for shape in shapes], float)
    targets = np.maximum(np.array(seconds, float), SHORTEST_S)
    predicted, kept = targets, np.ones(len(targets), bool)
    for _ in range(ROUNDS):
        # Weights from predicted times: weights from measured times would favour steps that happened to be short.
        weights = 1 / predicted
        coefficients = nonnegative_least_squares((columns * weights[:, None])[kept], (targets * weights)[kept])
        predicted = np.maximum(columns @ coefficients, SHORTEST_S)
        deviations = np.abs(targets / predicted - 1)
        kept = deviations <= OUTLIER * max(float(np.median(deviations)), 1e-3)
    counted = targets <= INTERRUPTION * predicted
    scale = float(targets[counted].sum() / predicted[counted].sum())
    factors = targets[counted] / (scale * predicted[counted])
    spread = np.quantile(factors, np.linspace(0, 1, QUANTILES))
    spread /= (spread[1:] + spread[:-1]).mean() / 2
    return _Terms({term: float(value) * scale for term, value in zip(terms, coefficients, strict=True) if value > 0},
                  tuple(round(float(factor), 5) for factor in spread), int((~counted).sum()))


def _error(model: CostModel, steps: Sequence[MeasuredStep]) -> StepError:
    predicted = np.array([model.step_seconds(step.shape) for step in steps])
    measured = np.array([step.step_s for step in steps], float)
    relative = np.abs(predicted - measured) / measured
    return StepError(len(steps), round(float(np.median(relative)), 5), round(float(np.percentile(relative, 90)), 5),
                     round(float(predicted.sum() / measured.sum() - 1), 5))
