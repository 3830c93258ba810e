"""Statistics as OpenTelemetry metrics, by opentelemetry-api: the extra `opentelemetry`.

    statistics = OpenTelemetryStatistics(model="austen-4m")      # through the global meter provider
    manager = GptManager(..., return_batch_manager_stats_cb=statistics,
                         optional_params=TrtGptModelOptionalParams(flush_stats_when_idle=True))
    statistics.observe(metrics, num_tokens)        # where requests ask for `return_perf_metrics`

An iteration parses its record and adds up some numbers. Gauges and counters are read when a reader collects them.

    gen_ai.server.time_to_first_token      histograms with the names, attributes and buckets of OpenTelemetry's
    gen_ai.server.time_per_output_token    conventions for generative AI, in seconds
    gen_ai.server.request.duration
    batch_manager.request_queue_time       histogram: arrival to the first step, in seconds
    nv_trt_llm_*                           gauges, with the attributes that are labels in prometheus.py
    batch_manager.*                        the other families of prometheus.py, each once: vllm:prompt_tokens is
                                           batch_manager.prompt_tokens, batch_manager_callback_seconds is
                                           batch_manager.callback, of unit s
"""

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from weakref import WeakKeyDictionary, ref

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation, get_meter
from opentelemetry.trace import Tracer

from .._version import __version__
from ..responses.perf_metrics import PerfMetrics
from .statistic_families import FAMILIES, LATENCIES, Family, LatestStatistics, latencies

__all__ = ["OpenTelemetryStatistics"]

PROVIDER = "batch_manager"
UNITS = {"_seconds": "s", "_microseconds": "us", "_perc": "1"}     # endings of families: units are not parts of names
# key of LATENCIES -> (name, bounds of the buckets in seconds); those of gen_ai.* are the convention's
HISTOGRAMS = {
    "time_to_first_token": ("gen_ai.server.time_to_first_token", (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)),
    "time_per_token": ("gen_ai.server.time_per_output_token", (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)),
    "end_to_end": ("gen_ai.server.request.duration", (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)),
    "queue": ("batch_manager.request_queue_time", (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)),
}


class OpenTelemetryStatistics(LatestStatistics):
    """A statistics callback whose numbers a meter of OpenTelemetry shows.

    model            value of the attributes `gen_ai.request.model` and `model`; it tells engines of one meter apart
    meter            None: one of the global meter provider, which may be set later
    operation_name   value of the attribute `gen_ai.operation.name`: "text_completion", "chat", ...
    tracer           makes a span for each request that is observed, within the span that is current then; None: none

    Records are those of one engine. Any thread may observe and collect. Gauges fall to zero where the engine has
    `flush_stats_when_idle=True`, which sends a record when the last request has left. The meter shows no more of it
    once this object has no reference.
    """

    def __init__(self, model: str, meter: Meter | None = None, *, operation_name: str = "text_completion",
                 tracer: Tracer | None = None) -> None:
        super().__init__(model)
        self.attributes = {"gen_ai.request.model": model}
        self.labels_of_the_original = {"model": model, "version": "1"}
        self._of_requests = {"gen_ai.operation.name": operation_name, "gen_ai.provider.name": PROVIDER,
                             "gen_ai.request.model": model}
        self._span_name = f"{operation_name} {model}"
        self._tracer = tracer
        self._instruments = _instruments_of(_global_meter() if meter is None else meter)
        self._instruments.show(self)

    def observe(self, metrics: PerfMetrics, num_tokens: int) -> None:
        """A request has ended.

        metrics      of its final response; see PerfMetrics.of, and Delta.metrics
        num_tokens   that it generated

        Its span reaches from its arrival to its last token, with the events `first step` and `first token`. There is
        none for a request without a token. The times are right where the engine's clock is `time.monotonic`.
        """
        for name, seconds in latencies(metrics, num_tokens):
            self._instruments.histograms[name].record(seconds, self._of_requests)
        if self._tracer is not None and metrics.last_token_time_ns:
            since_the_epoch = time.time_ns() - time.monotonic_ns()
            span = self._tracer.start_span(
                self._span_name, start_time=metrics.arrival_time_ns + since_the_epoch,
                attributes={**self._of_requests, "gen_ai.usage.output_tokens": num_tokens,
                            "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
                            "batch_manager.num_pauses": metrics.num_pauses})
            span.add_event("first step", timestamp=metrics.first_scheduled_time_ns + since_the_epoch)
            span.add_event("first token", timestamp=metrics.first_token_time_ns + since_the_epoch)
            span.end(metrics.last_token_time_ns + since_the_epoch)


class _Instruments:
    """The instruments of one meter. It takes each name once, so all statistics that it shows share them."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._shown: list[ref[OpenTelemetryStatistics]] = []

    def create(self, meter: Meter) -> None:
        for family in FAMILIES:
            name, unit = _name_and_unit(family)
            create = meter.create_observable_counter if family.is_counter else meter.create_observable_gauge
            create(name, [partial(self._observed, family)], unit, family.text)
        self.histograms = {
            latency: meter.create_histogram(name, "s", LATENCIES[latency][0],
                                            explicit_bucket_boundaries_advisory=bounds)
            for latency, (name, bounds) in HISTOGRAMS.items()}

    def show(self, statistics: OpenTelemetryStatistics) -> None:
        self._shown.append(ref(statistics, self._shown.remove))

    def _observed(self, family: Family, _: CallbackOptions) -> Iterator[Observation]:
        for shown in list(self._shown):          # other threads may add or drop statistics meanwhile
            if (statistics := shown()) is not None:
                attributes = (statistics.labels_of_the_original if family.is_of_the_original
                              else statistics.attributes)
                for category, value in family.values(statistics).items():
                    yield Observation(value, {**attributes, family.label: category} if family.label else attributes)


_OF_METERS: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()


def _instruments_of(meter: Meter) -> _Instruments:
    instruments = _OF_METERS.setdefault(meter, _Instruments())
    if not instruments.histograms:
        instruments.create(meter)
    return instruments


@lru_cache(maxsize=1)
def _global_meter() -> Meter:
    """One for all: before the provider is set, each that is asked for would be another."""
    return get_meter("batch_manager", __version__)


def _name_and_unit(family: Family) -> tuple[str, str]:
    """An exporter to Prometheus makes families of prometheus.py of these again, without their engine's prefix."""
    name = family.names[0]
    if family.is_of_the_original:
        return name, ""
    for prefix in ("vllm:", "batch_manager_"):
        name = name.removeprefix(prefix)
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return f"batch_manager.{name.removesuffix(ending)}", unit
    return f"batch_manager.{name}", ""
