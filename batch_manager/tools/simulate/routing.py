"""Rules that assign requests to replicas. The rules use only facts that a router can observe."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..traffic import PREFIX_TOKENS
from .replica import Replica
from .traffic import Traffic


class RoundRobin:
    """Assigns requests to the replicas in turn."""

    def __init__(self, replicas: Sequence[Replica], traffic: Traffic) -> None:
        self._count = len(replicas)
        self._next = 0

    def choose(self, index: int) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._count
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests.

    If several replicas have the fewest, it chooses the least recently chosen one of them.
    """

    def __init__(self, replicas: Sequence[Replica], traffic: Traffic) -> None:
        self._replicas = replicas
        self._turns = [0] * len(replicas)
        self._turn = 0

    def choose(self, index: int) -> int:
        turns, loads = self._turns, [replica.unfinished for replica in self._replicas]
        least = min(loads)
        chosen = min([number for number, load in enumerate(loads) if load == least], key=turns.__getitem__)
        self._turn += 1
        turns[chosen] = self._turn
        return chosen


class LongestPrefix:
    """Chooses the replica that has already received the longest prefix of the prompt, unless the load is unbalanced.

    Source: the cache-aware policy of SGLang's router (sgl-router, 2024), which records the prompts sent to each
    replica. A prompt goes to the replica with the longest match. If this match covers at most MATCH_SHARE of the
    prompt, it goes to the least loaded replica. Matches are ignored if the largest and the smallest load differ by
    more than MOST_DIFFERENCE requests and by more than the factor MOST_RATIO. This class compares prompts by the ids of
    their blocks of PREFIX_TOKENS tokens. For each replica, it remembers the BLOCKS_KEPT most recently sent blocks.
    """

    MATCH_SHARE = 0.5
    MOST_DIFFERENCE = 32
    MOST_RATIO = 1.5
    BLOCKS_KEPT = 1 << 16    # per replica

    def __init__(self, replicas: Sequence[Replica], traffic: Traffic) -> None:
        self._replicas, self._traffic = replicas, traffic
        self._least_loaded = LeastLoaded(replicas, traffic)
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in replicas]

    def choose(self, index: int) -> int:
        blocks = self._blocks(index)
        chosen = self._best_match(blocks)
        if chosen is None:
            chosen = self._least_loaded.choose(index)
        seen = self._seen[chosen]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self.BLOCKS_KEPT:
            seen.popitem(last=False)
        return chosen

    def _best_match(self, blocks: Sequence[int]) -> int | None:
        """Return the replica with the best match, or None if no match is long enough or the load is unbalanced."""
        loads = [replica.unfinished for replica in self._replicas]
        most, least = max(loads), min(loads)
        if not blocks or (most - least > self.MOST_DIFFERENCE and most > self.MOST_RATIO * least):
            return None
        first = blocks[0]
        matches = [(_matching(blocks, seen), -load, -number)
                   for number, (seen, load) in enumerate(zip(self._seen, loads, strict=True)) if first in seen]
        if not matches:
            return None
        length, _, number = max(matches)
        return -number if length > self.MATCH_SHARE * len(blocks) else None

    def _blocks(self, index: int) -> list[int]:
        """Return the ids of a prompt's blocks. The id of a block also depends on all earlier blocks of the prompt."""
        if self._traffic.prefixes is not None:
            return list(self._traffic.prefixes[index])
        prompt = np.ascontiguousarray(self._traffic.prompt(index), np.int32)
        ids, before = [], 0
        for first in range(0, len(prompt) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
            before = hash((before, prompt[first:first + PREFIX_TOKENS].tobytes()))
            ids.append(before)
        return ids


def _matching(blocks: Sequence[int], seen: OrderedDict[int, None]) -> int:
    for number, block in enumerate(blocks):
        if block not in seen:
            return number
    return len(blocks)


ROUTING: dict[str, type[RoundRobin] | type[LeastLoaded] | type[LongestPrefix]] = {
    "round-robin": RoundRobin, "least-loaded": LeastLoaded, "longest-prefix": LongestPrefix}
