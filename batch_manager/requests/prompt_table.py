"""Embeddings that a request brings for the prompt-tuning tokens of its prompt."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True, eq=False)
class PromptTable:
    """The table of one request.

    first_id   the id of its first row: the size of the model's vocabulary
    rows       [rows, hidden size] float32
    """

    first_id: int
    rows: np.ndarray

    def embeddings(self, token_ids: np.ndarray) -> np.ndarray | None:
        """Rows of the prompt-tuning tokens among `token_ids`, in order; None if there are none."""
        virtual = token_ids[token_ids >= self.first_id]
        return self.rows[virtual - self.first_id] if len(virtual) else None

    @cached_property
    def digest(self) -> bytes:
        """Differs between tables that differ: the ids of prompt-tuning tokens have no meaning without it."""
        return blake2b(np.ascontiguousarray(self.rows).data, digest_size=32,
                       person=b"prompt table").digest() + str(self.rows.shape).encode()
