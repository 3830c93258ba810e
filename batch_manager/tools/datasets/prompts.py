"""Random prompts for requests that have only lengths, and block ids for prompts that have tokens.

Here a block is PREFIX_TOKENS consecutive tokens of a prompt. As in traces, two blocks have the same id if their
prompts are equal from the beginning to the end of the block.
"""

from hashlib import blake2b

import numpy as np

from ..traffic import PREFIX_TOKENS
from .records import Record

FIRST_ORDINARY_TOKEN = 3    # many vocabularies reserve the first ids for control tokens
STREAM_OF_PROMPTS, STREAM_OF_BLOCKS = 2, 3    # ids of random streams


class PromptMaker:
    """Makes random prompts. A prompt depends on the arguments and on the index, length and prefix ids of its Record.

    Blocks of PREFIX_TOKENS tokens with the same prefix id have the same tokens. The last block of a prompt may have
    fewer tokens. These are the first tokens of a full block with the same prefix id.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._lowest = min(FIRST_ORDINARY_TOKEN, vocab_size - 1)

    def prompt(self, record: Record) -> list[int]:
        tokens: list[int] = []
        for block_id in record.prefix_ids:
            tokens += self._draw(PREFIX_TOKENS, STREAM_OF_BLOCKS, block_id)[:record.input_tokens - len(tokens)]
        return tokens + self._draw(record.input_tokens - len(tokens), STREAM_OF_PROMPTS, record.number)

    def _draw(self, count: int, *stream: int) -> list[int]:
        if not count:
            return []
        return np.random.default_rng([self._seed, *stream]).integers(self._lowest, self._vocab_size, count).tolist()


class BlockIds:
    """Assigns block ids to the blocks of prompts.

    Two blocks have the same id if all tokens from the beginning of the prompt to the end of the block are equal.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def ids(self, prompt: list[int]) -> tuple[int, ...]:
        digest, ids = blake2b(digest_size=16), []
        for at in range(0, len(prompt), PREFIX_TOKENS):
            digest.update(np.asarray(prompt[at:at + PREFIX_TOKENS], dtype=np.int64).tobytes())
            ids.append(self._known.setdefault(digest.digest(), len(self._known)))
        return tuple(ids)
