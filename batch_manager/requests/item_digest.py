"""A digest of an item of the get callback, by which ranks find out whether they were handed the same requests."""

from hashlib import blake2b
from typing import Any

import numpy as np

from .admission import usable_id
from .inference_request import InferenceRequest

OPTIONS = ("is_streaming", "priority", "deadline_s", "cache_salt", "kv_cache_retention_config")
UNREADABLE = b"unreadable"       # admission refuses it, with a reason


def item_digest(item: Any) -> tuple[int | None, bytes]:
    """Return (usable id or None, digest of id, tensors and options). Never raises.

    The arrival time does not count, because each rank has its own clock, nor does a logits post-processor, which only
    rank 0 calls.
    """
    request_id = usable_id(item)
    digest = blake2b(repr((request_id, type(item).__name__)).encode(), digest_size=16)
    try:
        if isinstance(item, InferenceRequest):
            digest.update(repr([getattr(item, option) for option in OPTIONS]).encode())
            digest.update(repr(item.logits_post_processor is None).encode())
            for name, value in sorted(item.input_tensors.items()):
                digest.update(name.encode() + _content(value))
    except Exception:                                  # of a tensor's own code
        return request_id, UNREADABLE
    return request_id, digest.digest()


def _content(value: Any) -> bytes:
    """Return bytes for a tensor. Those of a list and of an array of the same numbers are equal, in any width: a
    broadcast inside get may leave the list of one rank as it is, and give the others an array."""
    if isinstance(value, str | bytes):
        return repr(value).encode()
    try:
        array = np.asarray(value)
    except ValueError:                                 # lists of unequal lengths
        return repr(value).encode()
    kind = array.dtype.kind
    if kind == "O":
        return repr(value).encode()
    if kind == "i" or kind == "u" and (array.dtype.itemsize < 8 or array.size and int(array.max()) < 1 << 63):
        array = array.astype(np.int64)
    elif kind == "f":
        array = array.astype(np.float64)
    return repr((array.dtype.kind if array.size else "", array.shape)).encode() + array.tobytes()
