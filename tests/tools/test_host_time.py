"""The ratio of the host's time for an iteration to the time of a fixed Python loop is below twice the recorded ratio.

The ratio hardly depends on the speed of the machine.
"""

import pytest

from batch_manager.tools.host_bench import Setting, measure

# (streaming, native) -> ratio of 256 requests on CPython 3.11, recorded by
# python -m batch_manager.tools.host_bench --batch 256 [--native]
RECORDED = {(False, False): 0.57, (True, False): 1.55, (False, True): 2.1, (True, True): 3.3}
WORST = 2.0             # largest ratio, as a multiple of the recorded ratio
MOST_RUNS = 6           # a run may take any time while another process uses the processor


@pytest.mark.parametrize(("streaming", "native"), RECORDED)
def test_the_host_takes_no_more_than_twice_the_recorded_time(streaming, native):
    recorded, ratios = RECORDED[streaming, native], []
    for _ in range(MOST_RUNS):
        ratios.append(measure(Setting(batch=256, iterations=25, streaming=streaming, policy="guaranteed_no_evict",
                                      native=native))["ratio"])
        if len(ratios) > 1 and min(ratios) < WORST * recorded:
            break
    print(f"host time / calibration loop: {min(ratios):.2f}, recorded {recorded}")
    assert min(ratios) < WORST * recorded
