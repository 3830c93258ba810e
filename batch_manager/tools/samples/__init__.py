"""Two traces that are made up, of 1,000 requests each, in the formats of published ones.

    batch-manager workload sample-trace --as azure    --out batch_manager/tools/samples/azure.csv
    batch-manager workload sample-trace --as mooncake --out batch_manager/tools/samples/mooncake.jsonl

Owns     the files, and their names: `sample:azure` and `sample:mooncake` wherever a trace is read
Not      how they are made, which is `datasets.synthetic`'s; nothing here was recorded anywhere
Yours    a file that a command remakes byte for byte, and its name
"""

from pathlib import Path

FOLDER = Path(__file__).parent
SAMPLES = {"sample:azure": FOLDER / "azure.csv", "sample:mooncake": FOLDER / "mooncake.jsonl"}
