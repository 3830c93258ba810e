"""examples/custom_scheduler.py ends requests sooner on average than first come, first served."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_ends_requests_sooner_on_average_and_nobody_waits_for_ever():
    result = subprocess.run([sys.executable, ROOT / "examples" / "custom_scheduler.py"], capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first_come, shortest_first = [float(mean) for mean in re.findall(r"iteration ([\d.]+) on average", result.stdout)]
    assert shortest_first < first_come
    assert result.stdout.count("*") >= 16, "eight requests ended in each of the two runs"
