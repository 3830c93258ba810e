"""A model of blocks in dicts and sets: their contents, owners and cached texts. It uses none of the manager's code.

A *text* is a domain and all tokens up to a position. The content of a block is the text that ends in it, because the KV
of a token depends on all tokens before it. A block with the same tokens after other tokens is therefore a different
block.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batch_manager.handover import BlockCopy, BlockTableUpdates
from batch_manager.requests.llm_request import LlmRequest


class Text(NamedTuple):
    domain: tuple
    tokens: tuple[int, ...]


def domain_of(request: LlmRequest) -> tuple:
    """Return the domain of a request: the properties that requests must share to share blocks."""
    return request.adapter_digest, request.cache_salt


class BlockModel:
    """The blocks' contents and the block tables, as the manager's results define them, and the cached texts.

    tables    (slot, beam) -> {index: block id}, from the table updates
    written   block id -> the text that ends in it; missing: garbage
    host      host block id -> the text that ends in it
    found     text -> block id, for texts that were committed and not overwritten since
    evicted   number of cached texts that were overwritten
    """

    def __init__(self, unit: int, max_beam_width: int) -> None:
        self.unit = unit
        self.max_beam_width = max_beam_width
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        self.written: dict[int, Text] = {}
        self.host: dict[int, Text] = {}
        self.found: dict[Text, int] = {}
        self.evicted = 0

    # Writes of the device.

    def update(self, updates: BlockTableUpdates) -> None:
        for row, index, block_id in zip(updates.slots.tolist(), updates.indices.tolist(), updates.block_ids.tolist(),
                                        strict=True):
            self.tables.setdefault(divmod(row, self.max_beam_width), {})[index] = block_id

    def forget(self, slot: int) -> None:
        """Remove the sequence of a slot."""
        for row in [row for row in self.tables if row[0] == slot]:
            del self.tables[row]

    def shorten(self, slot: int, num_blocks: int) -> None:
        """Keep only the first blocks of the sequence of a slot."""
        for row, table in self.tables.items():
            if row[0] == slot:
                for index in [index for index in table if index >= num_blocks]:
                    del table[index]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for one in copies:
            domain, tokens = (self.host if one.from_host else self.written)[one.source]
            start = (len(tokens) - 1) // self.unit * self.unit
            assert len(tokens) - start >= one.num_tokens, f"{one} copies what was never written"
            target = self.host if one.to_host else self.written
            target[one.destination] = Text(domain, tokens[:start + one.num_tokens])

    def write(self, slot: int, beam: int, domain: tuple, tokens: Sequence[int], start: int) -> None:
        """Write the KV of the tokens from position `start` on."""
        for index in range(start // self.unit, -(-len(tokens) // self.unit)):
            block_id = self.tables[slot, beam][index]
            assert block_id not in self.found.values(), f"block {block_id} is written to and can be found"
            assert {row[0] for row in self.owners(block_id)} == {slot}, f"block {block_id} is somebody else's too"
            self.written[block_id] = Text(domain, tuple(tokens[:(index + 1) * self.unit]))

    def spoil(self, slot: int, beam: int, start: int) -> None:
        """Mark the sequence's blocks as garbage, from the block of position `start` on, as after a failed step."""
        for index, block_id in self.tables[slot, beam].items():
            if index >= start // self.unit:
                self.written.pop(block_id, None)

    def holds(self, block_id: int, text: Text) -> bool:
        """Whether a block holds the end of `text`, possibly followed by more tokens."""
        there = self.written.get(block_id)
        size, unit = len(text.tokens), self.unit
        return (there is not None and there.domain == text.domain and there.tokens[:size] == text.tokens
                and (len(there.tokens) - 1) // unit == (size - 1) // unit)

    def reads(self, slot: int, beam: int, domain: tuple, tokens: Sequence[int]) -> bool:
        """Whether the blocks in the table of (slot, beam) hold `tokens` of `domain`."""
        table = self.tables[slot, beam]
        return all(self.holds(table[index], Text(domain, tuple(tokens[:(index + 1) * self.unit])))
                   for index in range(-(-len(tokens) // self.unit)))

    # Owners.

    def owners(self, block_id: int) -> set[tuple[int, int]]:
        return {row for row, table in self.tables.items() if block_id in table.values()}

    def used(self) -> set[int]:
        return {block_id for table in self.tables.values() for block_id in table.values()}

    # Cached texts.

    def commit(self, domain: tuple, tokens: Sequence[int], row: Sequence[int]) -> None:
        """Cache the text that ends in each block of `row`, in order. Stop before a block that caches another text.

        row   block ids of the sequence
        """
        for index in range(-(-len(tokens) // self.unit)):
            text = Text(domain, tuple(tokens[:(index + 1) * self.unit]))
            if text not in self.found:
                if row[index] in self.found.values():
                    return
                assert self.holds(row[index], text), f"{text} is committed and was not computed"
                self.found[text] = row[index]

    def overwrite(self, block_id: int) -> None:
        """Evict the text of a block and the cached texts that continue it.

        Only texts of full blocks have continuations.
        """
        for text in [text for text, where in self.found.items() if where == block_id]:
            is_full = len(text.tokens) % self.unit == 0
            for below in [other for other in self.found if other == text or (
                    is_full and other.domain == text.domain and other.tokens[:len(text.tokens)] == text.tokens)]:
                del self.found[below]
                self.evicted += 1

    def matched(self, domain: tuple, tokens: Sequence[int]) -> list[int]:
        """Return the ids of a prompt's full cached blocks, up to the first full block that is not cached."""
        block_ids = []
        for end in range(self.unit, len(tokens) + 1, self.unit):
            block_id = self.found.get(Text(domain, tuple(tokens[:end])))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def begun(self, domain: tuple, tokens: Sequence[int], start: int, partial: bool) -> int:
        """Return how many of the prompt's tokens from `start` on a cached block can provide, at most.

        A cached block provides the tokens at its beginning that agree with the prompt. Without `partial`, it provides
        tokens only if it holds exactly the prompt's next tokens.
        """
        end = min(start + self.unit, len(tokens) - 1)
        wanted, before, most = tuple(tokens[start:end]), tuple(tokens[:start]), 0
        for text in self.found:
            rest = text.tokens[start:]
            if text.domain == domain and text.tokens[:start] == before and 0 < len(rest) <= self.unit:
                common = next((place for place, pair in enumerate(zip(rest, wanted, strict=False))
                               if pair[0] != pair[1]), min(len(rest), len(wanted)))
                most = max(most, common if partial or rest == wanted else 0)
        return most
