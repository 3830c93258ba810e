"""Takes back tokens that were claimed and turned out not to be wanted, as drafts do."""

from ..errors import InternalError
from ..requests.llm_request import LlmRequest
from .block_needs import ceil_div
from .block_pool import BlockPool
from .sequence_table import SequenceTable
from .window import AttentionWindow


def rewind(request: LlmRequest, num_tokens: int, shortest: int, sequences: SequenceTable, pool: BlockPool,
           window: AttentionWindow) -> None:
    """Shorten a sequence. Its blocks are the next to be handed out.

    shortest   tokens that must be left

    Raises InternalError when what is left cannot be gone on with: it is too short, blocks behind the new end left the
    window, or the last one is in somebody else's table too. Nothing was changed then.
    """
    if not sequences.has(request):
        raise InternalError(f"{request} is to be rewound and holds no blocks")
    slot, table, unit = request.seq_slot, sequences.table(request), window.tokens_per_block
    length = int(sequences.kv_lengths[slot]) - num_tokens
    end = ceil_div(max(length, 0), unit)
    last = table[:, end - 1].tolist() if length > 0 and length % unit else []
    if (length < shortest or sequences.dropped[slot] > window.num_dropped(length + 1)
            or any(pool.owners(block_id) > 1 for block_id in last)):
        raise InternalError(f"{request} cannot be rewound by {num_tokens} tokens")
    for column in reversed(range(end, table.shape[1])):
        for block_id in table[:, column].tolist():
            pool.give_back([block_id], front=True)
    sequences.shorten(request, length, end)
