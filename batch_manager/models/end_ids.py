"""Reads the end ids of a checkpoint: the tokens that end a sequence."""

from ..weights.checkpoint import Checkpoint
from ..weights.json_file import MAX_COUNT, Fields

MOST_END_IDS = 1000


def read_end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, or else of config.json; empty if neither has the field.

    Ids outside the vocabulary are dropped. Raises ModelLoadError for a value that is neither an integer nor a list of
    integers.
    """
    for fields in (checkpoint.generation_config(), checkpoint.config()):
        if fields is not None and "eos_token_id" in fields:
            return tuple(dict.fromkeys(token for token in _ids(fields) if 0 <= token < vocab_size))
    return ()


def _ids(fields: Fields) -> list[int]:
    value = fields.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MOST_END_IDS or not all(type(token) is int and abs(token) <= MAX_COUNT for token in ids):
        raise fields.fault("eos_token_id", f"an integer, or a list of at most {MOST_END_IDS:,} integers")
    return ids
