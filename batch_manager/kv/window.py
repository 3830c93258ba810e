"""How far back a query looks, and which blocks nobody looks at any more: arithmetic on lengths.

    size        tokens a query looks back on, itself included; the longest sequence when there is no window
    sinks       first tokens that stay visible although outside the window
    temporary   tokens by which a context may exceed the window while it is being computed
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The window of a cache whose blocks hold `tokens_per_block` tokens.

    A sequence is stored from its first token on, block after block; blocks that no later query can see are given back
    from the front. The blocks that hold sinks never are, so with sinks a sequence keeps ceil(sinks / tokens_per_block)
    blocks more than its window.
    """

    size: int
    max_seq_len: int
    tokens_per_block: int
    sinks: int = 0
    temporary: int = 0

    @property
    def slides(self) -> bool:
        """Whether a sequence can outgrow the window."""
        return self.size < self.max_seq_len

    @property
    def without_sliding(self) -> "AttentionWindow":
        """One that no sequence outgrows."""
        return replace(self, size=self.max_seq_len, sinks=0, temporary=0)

    @property
    def longest_stored(self) -> int:
        """Tokens of one sequence that are in the cache at most, rounding to blocks aside."""
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
        """Blocks of one beam that slides, at the moment when it has its next one and still has its oldest."""
        return -(-self.size // self.tokens_per_block) + self.sink_blocks + 1

    def num_dropped(self, length):
        """Blocks behind the sinks that no query of a sequence of this length, or a longer one, looks at.

        Takes an integer or an array of them.
        """
        behind = (length - self.size) // self.tokens_per_block - self.sink_blocks
        return behind * (behind > 0)
