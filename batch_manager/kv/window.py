"""How far back a query attends, and which blocks no query needs any more: arithmetic on lengths.

    size            tokens that a query attends to, itself included; the longest sequence when there is no window
    sinks           first tokens that stay visible although outside the window
    temporary       tokens by which a context may exceed the window while it is being computed; estimates read it
    unread_steps    tokens by which a sequence may be rewound: blocks that these shorter sequences need are kept, too
    max_draft_len   the most draft tokens that a claim adds to a sequence
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The window of a cache whose blocks hold `tokens_per_block` tokens.

    A sequence is stored from its first token on, block after block; blocks that no later query can see are released
    from the front. Blocks that hold sinks are not, so with sinks a sequence keeps ceil(sinks / tokens_per_block) blocks
    more than its window.
    """

    size: int
    max_seq_len: int
    tokens_per_block: int
    sinks: int = 0
    temporary: int = 0
    unread_steps: int = 0
    max_draft_len: int = 0

    @property
    def slides(self) -> bool:
        """Whether a sequence can outgrow the window."""
        return self.size < self.max_seq_len

    @property
    def without_sliding(self) -> "AttentionWindow":
        """A window that no sequence outgrows."""
        return replace(self, size=self.max_seq_len, sinks=0, temporary=0)

    @property
    def longest_stored(self) -> int:
        """The most tokens of one sequence that are in the cache, without rounding to blocks."""
        return self.size + self.temporary

    @property
    def bubble(self) -> int:
        """Tokens by which the sinks fall short of whole blocks; estimates count them as stored."""
        return -self.sinks % self.tokens_per_block

    @property
    def sink_blocks(self) -> int:
        return -(-self.sinks // self.tokens_per_block)

    @property
    def most_held(self) -> int:
        """Blocks of one sliding beam at the moment when it has its next blocks and still has its oldest.

        A claim releases the blocks that the first token of its step does not need. The next claim finds the accepted
        drafts of that step after that token, and adds drafts of its own.
        """
        tokens = self.size + self.unread_steps + 2 * self.max_draft_len
        return -(-tokens // self.tokens_per_block) + self.sink_blocks + 1

    def num_dropped(self, length: Lengths) -> Lengths:
        """Blocks after the sinks that are released when the first token of a step makes a sequence this long.

        No query of a sequence that is at most `unread_steps` tokens shorter, or is longer, needs them. Takes an integer
        or an array of them.
        """
        return self.num_unseen(length - self.unread_steps)

    def num_unseen(self, length: Lengths) -> Lengths:
        """Blocks after the sinks that no query of a sequence of this length, or of a longer one, needs.

        Takes an integer or an array of them.
        """
        outside: Lengths = (length - self.size) // self.tokens_per_block - self.sink_blocks
        outside *= outside > 0
        return outside
