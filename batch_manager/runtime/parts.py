"""What all forms of a step share on the device. Made once, when an engine is built."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..decoding.decoder import GptDecoder
from ..decoding.slots import SlotState
from .block_tables import BlockTables
from .device.running import Readbacks, Uploads, on_device

# (a form's own number of threads, or None: the engine's) -> a maker of context managers, see thread_count.py
Threads = Callable[[int | None], Callable[[], AbstractContextManager[None]]]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceParts:
    """What all forms of a step share.

    stream       the stream of all steps; None on a CPU. On the default stream, steps and other GPU work of the process
                 would wait for each other
    pool         the KV cache pool, [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size]
    host_pool    the host blocks; empty: evicted blocks are not copied to the host
    tables       the host's block tables, with which `pool` is read
    slots        state of each sequence; its features decide which forms serve a step
    decoder      samples from logits, with `slots`
    threads      (a form's own number of threads, or None) -> maker of a context manager for a step, see thread_count.py
    num_slots    number of sequences in the largest step. `slots` has one more if a form pads steps with a slot
    vocab_size   number of token ids of the model; prompt-tuning tokens have ids from there on
    """

    device: torch.device
    stream: "torch.cuda.Stream | None"
    uploads: Uploads
    readbacks: Readbacks
    pool: torch.Tensor
    host_pool: Sequence[torch.Tensor]
    tables: BlockTables
    slots: SlotState
    decoder: GptDecoder
    attention: Attention
    threads: Threads
    num_slots: int
    vocab_size: int

    @property
    def tokens_per_block(self) -> int:
        return self.pool.shape[4]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: use the device and the stream, record no gradients, and translate errors, see `on_device`.
        """
        with on_device(self.device, self.stream), torch.inference_mode():
            yield
