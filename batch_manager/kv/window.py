"""The attention window, and the blocks that no query needs any more. All functions depend on lengths only.

    size            number of tokens that a query attends to, itself included; without a window, the length of the
                    longest sequence
    sinks           number of first tokens that stay visible outside the window
    unread_steps    number of tokens by which a sequence may be rewound; blocks that the shorter sequence needs are kept
    max_draft_len   largest number of draft tokens that a claim adds to a sequence
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The window of a cache with blocks of `tokens_per_block` tokens.

    The cache stores a sequence from its first token on. It releases the oldest blocks when no later query sees
    them. It never releases blocks with sink tokens. A sequence keeps ceil(sinks / tokens_per_block) of these blocks
    besides the blocks of its window.
    """

    size: int
    max_seq_len: int
    tokens_per_block: int
    sinks: int = 0
    unread_steps: int = 0
    max_draft_len: int = 0

    @property
    def slides(self) -> bool:
        """Whether a sequence can outgrow the window."""
        return self.size < self.max_seq_len

    @property
    def without_sliding(self) -> "AttentionWindow":
        """An AttentionWindow of the same cache in which no block ever leaves the window."""
        return replace(self, size=self.max_seq_len, sinks=0)

    @property
    def bubble(self) -> int:
        """Number of tokens that the last block of sink tokens lacks to be full.

        TensorRT-LLM's estimates of a request's blocks include these tokens.
        """
        return -self.sinks % self.tokens_per_block

    @property
    def sink_blocks(self) -> int:
        return -(-self.sinks // self.tokens_per_block)

    @property
    def most_held(self) -> int:
        """The largest number of blocks that one beam of a sequence longer than the window holds.

        A claim first takes new blocks, and then releases the oldest blocks. The beam holds the most blocks between
        these two actions. A claim releases only the blocks that the first token of its step does not need. Two
        things happen before the next release. The sequence may grow by the drafts that the step accepts. The next
        claim then takes blocks for the drafts of the next step. The number therefore includes the drafts of two
        steps.
        """
        tokens = self.size + self.unread_steps + 2 * self.max_draft_len
        return -(-tokens // self.tokens_per_block) + self.sink_blocks + 1

    def num_dropped(self, length: Lengths) -> Lengths:
        """Number of blocks that a sequence has released. Sink blocks are not released.

        length   an integer or an array: the number of tokens up to and including the first token of the newest step
                 that has its blocks

        The sequence needs no released block again, neither when it grows nor after a rewind by up to `unread_steps`
        tokens.
        """
        return self.num_unseen(length - self.unread_steps)

    def num_unseen(self, length: Lengths) -> Lengths:
        """Number of blocks that a sequence of `length` tokens no longer needs. The sink blocks are always needed.

        `length` is an integer or an array.
        """
        outside: Lengths = (length - self.size) // self.tokens_per_block - self.sink_blocks
        outside *= outside > 0
        return outside
