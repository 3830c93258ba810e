"""Read files of requests (published traces, datasets, workloads) as lengths with arrival times, or as a workload.

Owns     the formats and their checks, the selection of requests for a replay, and random prompts for traces without
         prompts
Not      serving and simulation, which use this package; tokenizers, which are in `extras.tokenizer`
Yours    a new format is one class with the attributes of `records.RecordReader`, and a line in `formats`
"""

from .errors import DatasetError
from .formats import FORMATS, refuse_options_of_texts
from .reading import read_arrivals, read_records, read_workload
from .selection import ReadReport, Selection, selection_of

__all__ = ["FORMATS", "DatasetError", "ReadReport", "Selection", "read_arrivals", "read_records",
           "read_workload", "refuse_options_of_texts", "selection_of"]
