"""A digest of an item of the get callback, by which ranks find out whether they were handed the same requests."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from .admission import usable_id
from .inference_request import InferenceRequest

OPTIONS = ("is_streaming", "priority", "deadline_s", "cache_salt", "kv_cache_retention_config", "speculation")
UNREADABLE = b"unreadable"       # admission refuses it, with a reason
MOST_NUMBERS = 1 << 16           # of a tensor in `item_fields`
MOST_CHARACTERS = 40             # of any other value there
Described = tuple[str, tuple[int, ...], Any]


def item_digest(item: Any) -> tuple[int | None, bytes]:
    """Return (usable id or None, digest of id, tensors and options). Never raises.

    The arrival time does not count, because each rank has its own clock, nor does a logits post-processor, which only
    rank 0 calls.
    """
    request_id = usable_id(item)
    digest = blake2b(repr((request_id, type(item).__name__)).encode(), digest_size=16)
    try:
        for name, content in _fields(item):
            if isinstance(content, str):
                digest.update(f"{name} {content}".encode())
            else:
                kind = content.dtype.kind if content.size else ""
                digest.update(f"{name} {kind} {content.shape}".encode() + content.tobytes())
    except BaseException:  # noqa: B036  not even SystemExit of a tensor's own code may end the worker
        return request_id, UNREADABLE
    return request_id, digest.digest()


def item_fields(item: Any) -> tuple[Described, ...]:
    """Return (name, shape, content) of each field of an item that its digest covers. Never raises.

    content   text, then shape is (); or the first MOST_NUMBERS numbers of a tensor, one-dimensional
    """
    described: list[Described] = [("the type", (), type(item).__name__[:MOST_CHARACTERS])]
    try:
        for name, content in _fields(item):
            if isinstance(content, str) or content.ndim == 0:
                described.append((name, (), str(content)[:MOST_CHARACTERS]))
            else:
                described.append((name, content.shape, content.reshape(-1)[:MOST_NUMBERS]))
    except BaseException:  # noqa: B036  see above
        described.append(("its content", (), "unreadable"))
    return tuple(described)


def _fields(item: Any) -> Iterator[tuple[str, str | np.ndarray]]:
    if isinstance(item, InferenceRequest):
        for option in OPTIONS:
            yield option, repr(getattr(item, option))
        yield "logits_post_processor", "None" if item.logits_post_processor is None else "a function"
        for name, value in sorted(item.input_tensors.items()):
            yield name, _content(value)


def _content(value: Any) -> str | np.ndarray:
    """Return the content of a tensor. Those of a list and of an array of the same numbers are equal, in any width: a
    broadcast inside get may leave the list of one rank as it is, and give the others an array."""
    if isinstance(value, str | bytes):
        return repr(value)
    try:
        array = np.asarray(value)
    except ValueError:                                 # lists of unequal lengths
        return repr(value)
    kind = array.dtype.kind
    if kind == "i" or kind == "u" and (array.dtype.itemsize < 8 or array.size and int(array.max()) < 1 << 63):
        return array.astype(np.int64)
    if kind == "f":
        return array.astype(np.float64)
    return array if kind in "bu" else repr(value)
