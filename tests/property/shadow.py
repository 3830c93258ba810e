"""A model of the device's KV cache, which finds reads of wrong content.

The KV-cache content of a position depends on the token at the position and on all tokens before it. These tokens are
the position's history. The model gives each history a number, which represents the content of the position. A step
reads the content of visible positions through its updated block table, and writes the content of the positions that it
computes. This module does not call the KV cache manager.
"""

from collections.abc import Iterable, Sequence

from batch_manager.handover import BlockCopy, BlockTableUpdates

GARBAGE = -1


class Wrong(AssertionError):
    """Raised when the device or the run finds a violation."""


class Histories:
    """Gives each history a number, which depends on the number before its last token, this token and its extra id."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}

    def of(self, domain: tuple, tokens: Sequence[int], extra_ids: Sequence[int] | None) -> list[int]:
        """Return the right KV-cache content, a number, of each position of a sequence."""
        numbers, before = [], self._number(domain)
        for place, token in enumerate(tokens):
            extra = 0 if extra_ids is None or place >= len(extra_ids) else extra_ids[place]
            before = self._number((before, token, extra))
            numbers.append(before)
        return numbers

    def _number(self, history: tuple) -> int:
        return self._numbers.setdefault(history, len(self._numbers))


class ShadowDevice:
    """Blocks, host blocks and block tables. Rows of the tables are slot * max_beam_width + beam."""

    def __init__(self, tokens_per_block: int, window: int | None, sinks: int) -> None:
        self.unit = tokens_per_block
        self.window = window
        self.sinks = sinks
        self.blocks: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.tables: dict[int, dict[int, int]] = {}

    def update(self, updates: BlockTableUpdates) -> None:
        for row, index, block_id in zip(updates.slots.tolist(), updates.indices.tolist(), updates.block_ids.tolist(),
                                        strict=True):
            self.tables.setdefault(row, {})[index] = block_id

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy exactly `num_tokens` tokens of each block. The rest of the destination becomes garbage."""
        for one in copies:
            source = (self.host if one.from_host else self.blocks).get(one.source, [])
            content = source[:one.num_tokens]
            if len(content) < one.num_tokens:
                raise Wrong(f"{one} copies what was never written")
            content += [GARBAGE] * (self.unit - len(content))
            (self.host if one.to_host else self.blocks)[one.destination] = content

    def read(self, row: int, position: int, history: Sequence[int], name: object) -> None:
        """Check that the positions that the token at `position` attends to have the right content.

        row       row of the sequence in the block tables
        history   the right content of each position of the sequence
        name      the sequence's name for the message of Wrong
        """
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        for place in [*range(min(self.sinks, first)), *range(first, position)]:
            block_id = self.tables.get(row, {}).get(place // self.unit)
            found = self.blocks.get(block_id, [GARBAGE] * self.unit)[place % self.unit]
            if found != history[place]:
                raise Wrong(f"{name} reads position {place} before {position} in block {block_id}: {found}, not "
                            f"{history[place]}")

    def write(self, row: int, position: int, content: int) -> int:
        """Write the content of a position. Returns the id of the block that was written."""
        block_id = self.tables[row][position // self.unit]
        block = self.blocks.setdefault(block_id, [GARBAGE] * self.unit)
        block[position % self.unit] = content
        return block_id
