"""Tool calls and reasoning in the text of a model: parsing while the text arrives, and grammars that force calls.

Owns     the formats in which models write calls and reasoning, and their detection from a chat template
Not      the fields of requests and answers, which are `extras/openai`'s
Yours    a new format is a row of `formats.py`
"""

from .formats import FORMATS, REASONING_FORMATS, format_of_template, reasoning_of_template
from .parser import CallParser, Event

__all__ = ["FORMATS", "REASONING_FORMATS", "CallParser", "Event", "format_of_template", "reasoning_of_template"]
