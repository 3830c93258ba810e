"""Events of the prefix cache: what can be found in it. A router that reads them sends a prompt to where its beginning
is cached.

Blocks are named by hashes of 64 bits, which are equal in all engines with the same `KvCacheConfig.event_hash_key`.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple, cast

from .errors import ConfigError, type_name
from .option_values import MAX_COUNT, exact_integer, shown_option

HASH_BYTES, ADAPTER_BYTES, MOST_KEY_BYTES = 8, 32, 64
MEDIUMS = "GPU", "CPU"         # of the cache levels, as vLLM names them; the first pool is "GPU" on every device


class KvBlock(NamedTuple):
    """A block that can be found in the prefix cache.

    block_hash        names its tokens, the blocks before it, and the adapter and cache_salt of its prompts; 64 bits
    parent_hash       name of the block before it; None: it is the first
    token_ids         its tokens; None without `event_tokens`, and for prompts with a cache_salt
    token_extra_ids   an extra id for each token of `token_ids`, or None
    cache_level       0: in the pool; 1: in a host block
    priority          retention priority, 0..100
    lora_task_id      a task id of the adapter, or None
    is_full           False: fewer than `tokens_per_block` tokens, the end of a sequence
    """

    block_hash: int
    parent_hash: int | None
    token_ids: tuple[int, ...] | None
    token_extra_ids: tuple[int, ...] | None
    cache_level: int
    priority: int
    lora_task_id: int | None
    is_full: bool


class KvEvent(NamedTuple):
    """A change of what the prefix cache can find.

    event_id       rises by one; a gap means that events were dropped
    kind           "created": the cache is empty, and has its final size; the first event
                   "stored": `blocks` can be found, each below the one before it
                   "removed": `blocks` cannot be found any more; a block comes before the block that it followed
                   "updated": the level or the priority of `blocks` (one block) changed
    window_size    tokens to which a token attends; without a window, the length of the longest sequence
    blocks         as they are now; with "removed", as they were
    previous       with "updated": the block as it was
    num_blocks_per_cache_level   with "created": blocks of the pool, and host blocks
    tokens_per_block             tokens of a full block
    slides         whether a sequence may outgrow the window
    """

    event_id: int
    kind: str
    window_size: int
    tokens_per_block: int
    blocks: tuple[KvBlock, ...] = ()
    previous: KvBlock | None = None
    num_blocks_per_cache_level: tuple[int, ...] = ()
    slides: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the event with the names and nesting that TensorRT-LLM gives events in JSON."""
        return {"event_id": self.event_id, "data": {"type": self.kind, **self._data()}, "window_size": self.window_size}

    def _data(self) -> dict[str, Any]:
        if self.kind == "created":
            return {"num_blocks_per_cache_level": list(self.num_blocks_per_cache_level)}
        if self.kind == "removed":
            return {"block_hashes": [block.block_hash for block in self.blocks]}
        if self.kind == "stored":
            return {"parent_hash": self.blocks[0].parent_hash, "blocks": [
                {"type": "stored_block", "block_hash": block.block_hash, "tokens": _unique_tokens(block),
                 "cache_level": block.cache_level, "priority": block.priority} for block in self.blocks]}
        (block,), previous = self.blocks, self.previous
        assert previous is not None
        changes = {name: (getattr(previous, name), getattr(block, name)) for name in ("cache_level", "priority")}
        return {"block_hash": block.block_hash, **{
            name: None if old == new else {"type": "event_diff", "new_value": new, "old_value": old}
            for name, (old, new) in changes.items()}}

    def to_vllm(self) -> list[dict[str, Any]]:
        """Return the event in the schema of vLLM's subscribers: BlockStored, BlockRemoved and AllBlocksCleared.

        Each has its name as "type", and its fields. vLLM has full blocks only, so others are left out. "created" is
        AllBlocksCleared, and a change of the level is BlockStored and BlockRemoved. A change of the priority alone is
        nothing.
        """
        if self.kind == "created":
            return [{"type": "AllBlocksCleared"}]
        blocks = [block for block in self.blocks if block.is_full]
        if self.kind == "stored":
            return list(self._stored(blocks))
        if self.kind == "removed":
            return list(self._removed(blocks))
        previous = self.previous
        assert previous is not None
        if not blocks or previous.cache_level == blocks[0].cache_level:
            return []
        return [*self._stored(blocks), *self._removed([previous])]

    def _stored(self, blocks: Sequence[KvBlock]) -> Iterator[dict[str, Any]]:
        spec = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": self.window_size}
        for run in _runs(blocks):
            lora = run[0].lora_task_id
            yield {"type": "BlockStored", "block_hashes": [block.block_hash for block in run],
                   "parent_block_hash": run[0].parent_hash,
                   "token_ids": [token for block in run for token in block.token_ids or ()],
                   "block_size": self.tokens_per_block, "lora_id": lora, "medium": MEDIUMS[run[0].cache_level],
                   "lora_name": None if lora is None else str(lora), **(spec if self.slides else {})}

    def _removed(self, blocks: Sequence[KvBlock]) -> Iterator[dict[str, Any]]:
        for run in _runs(blocks):
            yield {"type": "BlockRemoved", "block_hashes": [block.block_hash for block in run],
                   "medium": MEDIUMS[run[0].cache_level]}


def _unique_tokens(block: KvBlock) -> list[dict[str, Any]]:
    tokens = block.token_ids or ()
    return [{"type": "unique_token", "token_id": token, "token_extra_id": extra}
            for token, extra in zip(tokens, block.token_extra_ids or (0,) * len(tokens), strict=True)]


def _runs(blocks: Sequence[KvBlock]) -> Iterator[Sequence[KvBlock]]:
    """Divide the blocks of an event where the level changes."""
    ends = [place for place, (one, other) in enumerate(pairwise(blocks), 1) if one.cache_level != other.cache_level]
    for start, end in pairwise([0, *ends, len(blocks)] if blocks else ()):
        yield blocks[start:end]


def kv_block_hashes(token_ids: Sequence[int], tokens_per_block: int, *, event_hash_key: bytes,
                    cache_salt: str | bytes | None = None, adapter_digest: bytes | None = None,
                    token_extra_ids: Sequence[int] | None = None) -> list[int]:
    """Return the names that events give to the full blocks of a prompt, in order.

    tokens_per_block   that of the engine; a backend of your own may have any
    event_hash_key     as in KvCacheConfig
    adapter_digest     content of the prompt's adapter, bytes.fromhex(AdapterInfo.digest); None: no adapter
    token_extra_ids    an extra id for each token, as the request's `input_token_extra_ids`

    Raises ConfigError.
    """
    check_hash_key("event_hash_key", event_hash_key)
    size = exact_integer(tokens_per_block)
    if size is None or size < 1:
        raise ConfigError(f"tokens_per_block is {shown_option(tokens_per_block)}", "expected an integer of at least 1",
                          "pass that of the engine's KvCacheConfig")
    if type(cache_salt) not in (str, bytes, type(None)):
        raise ConfigError(f"cache_salt is of type {type(cache_salt).__name__}", "expected a str, bytes or None")
    if adapter_digest is not None and (type(adapter_digest) is not bytes or len(adapter_digest) != ADAPTER_BYTES):
        raise ConfigError(f"adapter_digest is {adapter_digest!r:.200}", f"expected {ADAPTER_BYTES} bytes, or None",
                          "pass bytes.fromhex(AdapterInfo.digest)")
    tokens = _ids("token_ids", token_ids)
    extra = None if token_extra_ids is None else _ids("token_extra_ids", token_extra_ids)
    if extra is not None and len(extra) != len(tokens):
        raise ConfigError(f"token_extra_ids has {len(extra):,} ids and token_ids has {len(tokens):,}",
                          "expected one for each token")
    parent, hashes = root_hash(event_hash_key, adapter_digest, cache_salt, extra is not None), []
    for start in range(0, len(tokens) - size + 1, size):
        end = start + size
        parent = block_hash(event_hash_key, parent, tokens[start:end], None if extra is None else extra[start:end])
        hashes.append(as_number(parent))
    return hashes


def check_hash_key(name: str, key: object) -> None:
    """Raise ConfigError unless a key of the hashes of blocks is one. The error does not show it."""
    if not (isinstance(key, bytes) and 1 <= len(key) <= MOST_KEY_BYTES):
        raise ConfigError(f"{name} is of type {type(key).__name__}"
                          + (f" and has {len(key)} bytes" if isinstance(key, bytes) else ""),
                          f"expected 1 to {MOST_KEY_BYTES} bytes", "pass for instance bytes.fromhex(...)")


def _ids(name: str, values: object) -> list[int]:
    """Return token ids or extra ids. An error does not show them: they may be a prompt."""
    expected, ids = "expected a list of integers in 0..2^63-1", list[int]()
    try:
        if isinstance(values, str | bytes | bytearray | memoryview):
            raise TypeError
        given = list(cast(Iterable[object], values))
    except TypeError:
        raise ConfigError(f"{name} is of type {type_name(values)}", expected) from None
    for place, value in enumerate(given):
        number = exact_integer(value)
        if number is None or not 0 <= number <= MAX_COUNT:
            fact = f"of type {type_name(value)}" if number is None else "out of range"
            raise ConfigError(f"{name}[{place}] is {fact}", expected)
        ids.append(number)
    return ids


def root_hash(key: bytes, adapter_digest: bytes | None, cache_salt: Hashable, uses_extra_ids: bool,
              size: int = HASH_BYTES) -> bytes:
    """Return the digest that stands for the parent of a first block. Arguments as for `digest_of` and kv.Domain."""
    return digest_of(key, ("adapter", adapter_digest), ("salt", cache_salt), ("extra", uses_extra_ids), size=size)


def block_hash(key: bytes, parent: bytes, token_ids: Sequence[int], extra_ids: Sequence[int] | None,
               size: int = HASH_BYTES) -> bytes:
    """Return the digest of a block with these tokens that follows the block with the digest `parent`."""
    fields: list[tuple[str, Hashable]] = [("parent", parent), ("tokens", array("q", token_ids).tobytes())]
    if extra_ids is not None:
        fields.append(("extra", ",".join(map(str, extra_ids))))
    return digest_of(key, *fields, size=size)


def as_number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


def digest_of(key: bytes, *fields: tuple[str, Hashable], size: int) -> bytes:
    """Return a digest of `fields`, which are pairs of a name and a value.

    key, size   key of blake2b, at most 64 bytes, and bytes of the digest

    The digest covers the type and the length of each value, so that different fields never have the same encoding.
    """
    encoded: list[bytes] = []
    for name, value in fields:
        data = value if isinstance(value, bytes) else repr(value).encode()
        encoded += (f"{name}:{type(value).__name__}:{len(data)}:".encode(), data)
    return blake2b(b"".join(encoded), key=key, digest_size=size).digest()
