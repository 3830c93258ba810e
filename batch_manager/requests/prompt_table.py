"""The embeddings of a request's prompt-tuning tokens."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True, eq=False)
class PromptTable:
    """The embedding table of one request, with a row for each prompt-tuning token id.

    first_id   token id of the first row: the size of the model's vocabulary
    rows       [rows, hidden size] float32
    """

    first_id: int
    rows: np.ndarray

    def embeddings(self, token_ids: np.ndarray) -> np.ndarray | None:
        """The rows of the prompt-tuning tokens among `token_ids`, in order; None without prompt-tuning tokens."""
        tuning_ids = token_ids[token_ids >= self.first_id]
        return self.rows[tuning_ids - self.first_id] if len(tuning_ids) else None

    @cached_property
    def digest(self) -> bytes:
        """A digest of the table, which identifies the meaning of prompt-tuning ids in the prefix cache."""
        return blake2b(np.ascontiguousarray(self.rows).data, digest_size=32,
                       person=b"prompt table").digest() + str(self.rows.shape).encode()
