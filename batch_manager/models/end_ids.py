"""Reads the end ids of a checkpoint: the tokens that end a sequence."""

from ..weights.checkpoint import Checkpoint
from ..weights.json_file import MAX_COUNT, Fields

MOST_END_IDS = 1000


def read_end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Return the end ids of the checkpoint that are in the vocabulary. Raises ModelLoadError like `stated_end_ids`."""
    return in_vocabulary(stated_end_ids(checkpoint), vocab_size)


def stated_end_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, or else of config.json; empty if neither has the field.

    An id can be outside the vocabulary. Raises ModelLoadError for a value that is neither an integer nor a list of at
    most 1,000 integers.
    """
    for fields in (checkpoint.generation_config(), checkpoint.config()):
        if fields is not None and "eos_token_id" in fields:
            return tuple(dict.fromkeys(_ids(fields)))
    return ()


def in_vocabulary(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    return tuple(token for token in ids if 0 <= token < vocab_size)


def _ids(fields: Fields) -> list[int]:
    value = fields.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MOST_END_IDS or not all(type(token) is int and abs(token) <= MAX_COUNT for token in ids):
        raise fields.fault("eos_token_id", f"an integer, or a list of at most {MOST_END_IDS:,} integers")
    return ids
