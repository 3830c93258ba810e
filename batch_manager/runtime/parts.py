"""What all forms of a step share on the device. Made once, when an engine is built."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.interface import Attention
from ..decoding.decoder import GptDecoder
from ..decoding.slots import SlotState
from .adapters.port import LoraPort
from .block_tables import BlockTables
from .device.running import Readbacks, Uploads, on_stream

# (a form's own number of threads, or None: the engine's) -> a maker of context managers, see thread_count.py
Threads = Callable[[int | None], Callable[[], AbstractContextManager[None]]]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceParts:
    """What all forms of a step share.

    stream           the stream of all steps; None on a CPU. On the default stream, steps and other GPU work of the
                     process would wait for each other
    pool             the KV cache pool, [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size]
    host_pool        the host blocks; empty: evicted blocks are not copied to the host
    tables           the host's block tables, with which `pool` is read
    slots            state of each sequence; its features decide which forms serve a step
    decoder          samples from logits, with `slots`
    threads          see `Threads`
    num_threads      threads of a step on a CPU; None: torch's setting
    num_slots        number of sequences in the largest step. `slots` has one more if a form pads steps with a slot
    max_beam_width   largest number of beams of a sequence
    max_seq_len      largest number of tokens of a sequence
    vocab_size       number of token ids of the model; prompt-tuning tokens have ids from there on
    adapters         the adapters of the model's layers; None: it has none
    """

    device: torch.device
    stream: torch.Stream | None
    uploads: Uploads
    readbacks: Readbacks
    pool: torch.Tensor
    host_pool: Sequence[torch.Tensor]
    tables: BlockTables
    slots: SlotState
    decoder: GptDecoder
    attention: Attention
    threads: Threads
    num_threads: int | None
    num_slots: int
    max_beam_width: int
    max_seq_len: int
    vocab_size: int
    tokens_per_block: int
    adapters: LoraPort | None = None

    def clear_entries(self, pool_slots: np.ndarray) -> None:
        """Fill entries of the KV cache pool with zeros.

        pool_slots   [k] int64: where they are, as PackedStep.pool_slots
        """
        blocks, offsets = np.divmod(pool_slots, self.tokens_per_block)
        with on_stream(self.stream), torch.inference_mode():
            self.pool[blocks, :, :, :, offsets] = 0
