"""Files of requests: published traces, datasets, workloads. What is in them, as arrivals or as a workload.

Owns     the formats, their checks, the slice and the limits of a replay, and prompts for traces that have lengths alone
Not      serving and simulating, which read from here; nor texts' tokenizers, which are `extras.tokenizer`'s
Yours    a new format is one class with the attributes of `records.RecordReader`, and a line in `formats`
"""

from .errors import DatasetError
from .formats import FORMATS
from .reading import read_arrivals, read_records, read_workload
from .selection import ReadReport, Selection, add_selection_arguments, selection_of

__all__ = ["FORMATS", "DatasetError", "ReadReport", "Selection", "add_selection_arguments", "read_arrivals",
           "read_records", "read_workload", "selection_of"]
