"""Statistics as OpenTelemetry metrics. Needs opentelemetry-api: the extra `opentelemetry`.

    statistics = OpenTelemetryStatistics(model="austen-4m")      # through the global meter provider
    manager = GptManager(..., return_batch_manager_stats_cb=statistics,
                         optional_params=TrtGptModelOptionalParams(flush_stats_when_idle=True))
    statistics.observe(metrics, num_tokens)        # for requests with `return_perf_metrics`

Per iteration, the callback parses one record and updates a few sums. Gauges and counters are computed on collection.

    gen_ai.server.time_to_first_token      histograms in seconds, with the names, attributes and buckets of
    gen_ai.server.time_per_output_token    OpenTelemetry's semantic conventions for generative AI
    gen_ai.server.request.duration
    batch_manager.request_queue_time       histogram: arrival to the first step, in seconds
    nv_trt_llm_*                           gauges; attributes are the labels of prometheus.py
    batch_manager.*                        the other families of prometheus.py. A family can have several names
                                           there. The name here is the first of them, with its prefix replaced by
                                           `batch_manager.`: vllm:prompt_tokens becomes
                                           batch_manager.prompt_tokens. A suffix that is a unit becomes the unit
                                           of the metric: batch_manager_callback_seconds becomes
                                           batch_manager.callback, unit s
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
UNITS = {"_seconds": "s", "_microseconds": "us", "_perc": "1"}     # suffix of a family name -> unit
# Key of LATENCIES -> (name, bucket bounds in seconds). The conventions define the bounds of gen_ai.*.
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
    """A statistics callback that publishes metrics through an OpenTelemetry meter.

    model            value of the attributes `gen_ai.request.model` and `model`; distinguishes engines on one meter
    meter            the meter to publish through; None: a meter of the global meter provider, which may be set later
    operation_name   value of the attribute `gen_ai.operation.name`: "text_completion", "chat", ...
    tracer           creates a span for each observed request, as a child of the current span; None: no spans

    Use one object per engine. Any thread may observe and collect. With `flush_stats_when_idle=True`, the engine sends
    a record after its last request ends, so gauges fall to zero. The meter stops publishing when this object is
    garbage-collected.
    """

    def __init__(self, model: str, meter: Meter | None = None, *, operation_name: str = "text_completion",
                 tracer: Tracer | None = None) -> None:
        super().__init__(model)
        self.attributes = {"gen_ai.request.model": model}
        self.nv_trt_llm_labels = {"model": model, "version": "1"}
        self._request_attributes = {"gen_ai.operation.name": operation_name, "gen_ai.provider.name": PROVIDER,
                                    "gen_ai.request.model": model}
        self._span_name = f"{operation_name} {model}"
        self._tracer = tracer
        self._instruments = _instruments_of(_global_meter() if meter is None else meter)
        self._instruments.show(self)

    def observe(self, metrics: PerfMetrics, num_tokens: int) -> None:
        """Record the latencies of a finished request, and create its span.

        metrics      metrics of the final response; see PerfMetrics.of and Delta.metrics
        num_tokens   number of generated tokens

        The span runs from arrival to last token, with the events `first step` and `first token`. A request without
        tokens gets no span. Span times assume that the engine's clock is `time.monotonic`.
        """
        for name, seconds in latencies(metrics, num_tokens):
            self._instruments.histograms[name].record(seconds, self._request_attributes)
        if self._tracer is not None and metrics.last_token_time_ns:
            since_the_epoch = time.time_ns() - time.monotonic_ns()
            span = self._tracer.start_span(
                self._span_name, start_time=metrics.arrival_time_ns + since_the_epoch,
                attributes={**self._request_attributes, "gen_ai.usage.output_tokens": num_tokens,
                            "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
                            "batch_manager.num_pauses": metrics.num_pauses})
            span.add_event("first step", timestamp=metrics.first_scheduled_time_ns + since_the_epoch)
            span.add_event("first token", timestamp=metrics.first_token_time_ns + since_the_epoch)
            span.end(metrics.last_token_time_ns + since_the_epoch)


class _Instruments:
    """The instruments of one meter.

    All statistics objects on the meter share them, because a meter accepts each name once.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._shown: list[ref[OpenTelemetryStatistics]] = []

    def create(self, meter: Meter) -> None:
        for family in FAMILIES:
            name, unit = _name_and_unit(family)
            create = meter.create_observable_counter if family.is_counter else meter.create_observable_gauge
            create(name, [partial(self._observed, family)], unit, family.description)
        self.histograms = {
            latency: meter.create_histogram(name, "s", LATENCIES[latency][0],
                                            explicit_bucket_boundaries_advisory=bounds)
            for latency, (name, bounds) in HISTOGRAMS.items()}

    def show(self, statistics: OpenTelemetryStatistics) -> None:
        self._shown.append(ref(statistics, self._shown.remove))

    def _observed(self, family: Family, _: CallbackOptions) -> Iterator[Observation]:
        for shown in list(self._shown):          # a copy: other threads may add or drop entries
            if (statistics := shown()) is not None:
                attributes = (statistics.nv_trt_llm_labels if family.is_nv_trt_llm
                              else statistics.attributes)
                for category, value in family.values(statistics).items():
                    yield Observation(value, {**attributes, family.label: category} if family.label else attributes)


_INSTRUMENTS: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()


def _instruments_of(meter: Meter) -> _Instruments:
    instruments = _INSTRUMENTS.setdefault(meter, _Instruments())
    if not instruments.histograms:
        instruments.create(meter)
    return instruments


@lru_cache(maxsize=1)
def _global_meter() -> Meter:
    """Return the package's global meter.

    The meter is cached, because get_meter returns a new proxy on each call while there is no provider.
    """
    return get_meter("batch_manager", __version__)


def _name_and_unit(family: Family) -> tuple[str, str]:
    """Return the OpenTelemetry name and the unit of a family.

    A Prometheus exporter joins the name and the unit. The result is the family's name in prometheus.py, with the prefix
    `batch_manager_` in place of `vllm:` or `sglang:`.
    """
    name = family.names[0]
    if family.is_nv_trt_llm:
        return name, ""
    for prefix in ("vllm:", "sglang:", "batch_manager_"):
        name = name.removeprefix(prefix)
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return f"batch_manager.{name.removesuffix(ending)}", unit
    return f"batch_manager.{name}", ""
