"""Two synthetic traces of 1,000 requests each, in the formats of published traces.

    batch-manager workload sample-trace --as azure    --out batch_manager/tools/samples/azure.csv
    batch-manager workload sample-trace --as mooncake --out batch_manager/tools/samples/mooncake.jsonl

Owns     the files, and their names: `sample:azure` and `sample:mooncake` wherever a program reads a trace
Not      making the traces, which `datasets.synthetic` does; recorded traces
Yours    a new sample: a file that a command can make again byte for byte, and its name
"""

from pathlib import Path

FOLDER = Path(__file__).parent
SAMPLES = {"sample:azure": FOLDER / "azure.csv", "sample:mooncake": FOLDER / "mooncake.jsonl"}
