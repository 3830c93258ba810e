"""The native backend: runs a loaded checkpoint with this package's models, attention and decoding."""

from collections.abc import Mapping

import torch

from ..handover import NO_UPDATES, ScheduledBatch
from ..seams import BackendInfo, MemoryUsage, PendingStep
from ..triton_kernels.cpu.native.library import release_helpers
from .device.memory import release_memory
from .device.running import AllocatedMemory, finish_stream, on_device
from .forms.form import Forms
from .operations import Operations
from .parts import DeviceParts


class NativeBackend:
    """The seams.ModelBackend that runs a loaded model. build_backend.py makes it.

    parts        what all forms of a step share
    operations   carries out the device operations of batches
    forms        choose how each step runs
    held         bytes that weights, KV cache pool and host blocks take on the host
    """

    def __init__(self, parts: DeviceParts, operations: Operations, forms: Forms, info: BackendInfo, held: MemoryUsage,
                 ) -> None:
        self.info, self._held = info, held
        self._parts: DeviceParts | None = parts
        self._operations: Operations | None = operations
        self._forms: Forms | None = forms
        self._device, self._allocated = parts.device, AllocatedMemory(parts.device)

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch a step; see seams.ModelBackend.

        After an exception, the same step can be started again. The new run repeats the updates of block tables and
        slots, skips the `batch.operations` that are done, and writes the KV cache entries of the tokens again. Sampled
        tokens are stored last, and by position.
        """
        parts = self._parts
        with on_device(parts.device, parts.stream), torch.inference_mode():
            if batch.context or batch.block_table_updates is not NO_UPDATES:
                parts.tables.update(batch)
            if batch.operations:
                self._operations.carry_out(batch)
            if batch.context:
                parts.decoder.set_up((work.slot, work.setup) for work in batch.context if work.setup is not None)
            return self._forms.start(batch)

    def memory_usage(self) -> MemoryUsage:
        pinned = self._held.pinned
        if self._parts is not None:
            pinned += self._parts.uploads.pinned_bytes + self._parts.readbacks.pinned_bytes
        return MemoryUsage(gpu=self._allocated.num_bytes(), cpu=self._held.cpu, pinned=pinned)

    def figures(self) -> Mapping[str, int]:
        """Return the backend's own statistics: the steps by form, and what the forms count."""
        return {} if self._forms is None else self._forms.figures()

    def close(self) -> None:
        if self._forms is None:
            return
        finish_stream(self._parts.stream)                # freed memory may be reused at once
        release_helpers(self._parts)
        self._forms.close()
        self._parts = self._operations = self._forms = None
        self._held = MemoryUsage()
        release_memory(self._device)
        self._allocated = AllocatedMemory(self._device)
