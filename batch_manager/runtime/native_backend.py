"""The native backend: runs a loaded checkpoint with this package's models, attention and decoding."""

from collections.abc import Callable, Mapping

import torch

from ..handover import NO_UPDATES, ScheduledBatch, StepOutput
from ..seams import BackendInfo, MemoryUsage, PendingStep
from ..triton_kernels.cpu.native.library import release_helpers
from .device.memory import release_memory
from .device.running import AllocatedMemory, finish_stream, on_device
from .forms.form import Forms
from .operations import Operations
from .parts import DeviceParts


class OperationsAlone:
    """A launched batch without sequences."""

    def __init__(self, batch: ScheduledBatch, stream: torch.Stream | None) -> None:
        self._micro_batch_id, self._stream = batch.micro_batch_id, stream

    def finish(self) -> StepOutput:
        if self._stream is not None:
            self._stream.synchronize()
        return StepOutput.merge([], self._micro_batch_id)


class NativeBackend:
    """The seams.ModelBackend that runs a loaded model. build_backend.py makes it.

    parts        what all forms of a step share
    operations   carries out the device operations of batches
    forms        choose how each step runs
    held         bytes that weights, KV cache pool and host blocks take on the host
    make_fingerprint   what `fingerprint` calls
    """

    def __init__(self, parts: DeviceParts, operations: Operations, forms: Forms, info: BackendInfo, held: MemoryUsage,
                 make_fingerprint: Callable[[], bytes] | None = None) -> None:
        self.info, self._held, self._make_fingerprint = info, held, make_fingerprint
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
                if not batch.num_sequences:
                    return OperationsAlone(batch, parts.stream)
            if batch.context:
                parts.decoder.set_up((work.slot, work.setup) for work in batch.context if work.setup is not None)
            return self._forms.start(batch)

    def host_block(self, host_id: int) -> memoryview:
        """The memory of a host block. Any thread may call it."""
        return memoryview(self._parts.host_pool[host_id].reshape(-1).view(torch.uint8).numpy())

    def fingerprint(self) -> bytes:
        """Return a digest of the weights and of everything else that the content of a block depends on."""
        return self._make_fingerprint()

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
