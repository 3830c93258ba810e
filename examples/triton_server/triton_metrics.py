"""The `nv_trt_llm_*` metrics of TensorRT-LLM's Triton backend, from the statistics of a GptManager."""

import json
import time
from calendar import timegm
from typing import Any

from batch_manager.extras.statistic_families import NV_TRT_LLM


class Metrics:
    """Gauges on the server's /metrics. The worker thread of one manager sets them.

    pb_utils   the module triton_python_backend_utils
    is_v1      whether the manager uses static batching, which has a separate metric family
    period_s   shortest time in seconds between two updates of the gauges
    """

    def __init__(self, pb_utils: Any, model: str, version: str, is_v1: bool, period_s: float) -> None:
        left_out = f"nv_trt_llm_{'inflight_batcher' if is_v1 else 'v1'}_metrics"
        self._families, self._gauges = [], []                    # a family exists as long as its object
        for name, (label, categories) in NV_TRT_LLM.items():
            if name != left_out:
                family = pb_utils.MetricFamily(name=name, description=f"Batch manager: {label} of {model}",
                                               kind=pb_utils.MetricFamily.GAUGE)
                self._families.append(family)
                self._gauges += [(key, family.Metric(labels={"model": model, "version": version, label: category}))
                                 for category, key in categories.items()]
        self._period_s, self._next_s, self._latest = period_s, 0.0, None

    def keep(self, record: str) -> None:
        """Keep a statistics record until the next `publish`."""
        self._latest = record

    def publish(self) -> None:
        """Set the gauges from the latest new record, at most once per period, because each gauge costs a message."""
        now = time.monotonic()
        if self._latest is None or now < self._next_s:
            return
        self._next_s = now + self._period_s
        record, self._latest = json.loads(self._latest), None
        record["Timestamp"] = timegm(time.gmtime())
        for key, gauge in self._gauges:
            gauge.set(record.get(key, 0))
