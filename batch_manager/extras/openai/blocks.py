"""The blocks of an output: text, reasoning, and each call, one after another. For the APIs whose answers are lists."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import NamedTuple

from ..tool_calls.parser import ARGUMENTS, BEGINS, ENDS, REASONING, TEXT, Event

CALL = "call"
OPENS, MORE, CLOSES = "opens", "more", "closes"


class Block(NamedTuple):
    """A block so far.

    kind     `text`, `reasoning` or `call`
    text     its text, or the JSON of the call's arguments
    name, identity   of a call
    is_whole         of a call
    """

    kind: str
    text: str = ""
    name: str = ""
    identity: str = ""
    is_whole: bool = False


class Blocks:
    """Turns the events of one output into blocks.

    blocks   all closed blocks so far
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._parts: list[str] = []

    def add(self, events: Iterable[Event]) -> Iterator[tuple[str, Block, str]]:
        """Yield (`opens`, `more` or `closes`, the block, the new text). A block that closes has its whole text."""
        for event in events:
            if event.kind == ENDS:
                yield from self.close(event.is_whole)
                continue
            kind = event.kind if event.kind in (TEXT, REASONING) else CALL
            if event.kind == BEGINS or self._open is None or self._open.kind != kind:
                yield from self.close()
                self._open = Block(kind, "", event.name, event.identity)
                yield OPENS, self._open, ""
            if event.kind in (TEXT, REASONING, ARGUMENTS):
                self._parts.append(event.text)
                yield MORE, self._open, event.text

    def close(self, is_whole: bool = True) -> Iterator[tuple[str, Block, str]]:
        """Close the open block, if there is one."""
        if self._open is not None:
            block = self._open._replace(text="".join(self._parts), is_whole=is_whole)
            self._open, self._parts = None, []
            self.blocks.append(block)
            yield CLOSES, block, ""

    async def read(self, parts: AsyncIterator[Iterable[Event]]) -> list[Block]:
        """Read an output to its end, and return all its blocks."""
        async for events in parts:
            for _ in self.add(events):
                pass
        for _ in self.close():
            pass
        return self.blocks
