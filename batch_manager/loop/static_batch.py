"""The static batch that runs: what is remembered of it while its members come to their ends."""

from collections.abc import Sequence

from ..requests.llm_request import LlmRequest
from ..stats.iteration_stats import StaticBatchStats


class StaticBatch:
    """The batch that was formed last, in numbers.

    stats   as it was formed; nothing that happens to a member changes them
    """

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.stats = StaticBatchStats()

    def form(self, members: Sequence[LlmRequest]) -> None:
        self.stats = StaticBatchStats.of(members, self._max_seq_len)

    @property
    def num_places(self) -> int:
        """Rows of the padded batch, those of members that are done included."""
        return self.stats.members
