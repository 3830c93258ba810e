"""What a step calls on the device: streams, uploads, readbacks, graphs and errors."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakSet

import numpy as np
import torch

from ...errors import DeviceLostError

MEMORY_SECONDS = 1.0               # time for which a value of GPU memory is reused in statistics
UPLOAD_BUFFERS = 8                 # kept and used in turn, because copies of earlier steps may still read their buffers
LARGE_READBACK_BYTES = 1 << 20     # larger tensors are read back one by one; smaller tensors are joined into one copy
ALIGNMENT = 16                     # bytes; of each array within an upload

_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())


class AllocatedMemory:
    """Reads the number of bytes that torch has allocated to tensors on a GPU in this process; 0 for a CPU.

    Reading the value from torch takes 50 microseconds, which is too long for the statistics of every iteration. The
    value is therefore read at most once in MEMORY_SECONDS.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._num_bytes, self._asked_at = device, 0, -math.inf

    def num_bytes(self) -> int:
        """Return the number of allocated bytes, read from torch at most MEMORY_SECONDS ago."""
        if self._device.type == "cuda" and time.monotonic() - self._asked_at >= MEMORY_SECONDS:
            self._num_bytes, self._asked_at = torch.cuda.memory_allocated(self._device), time.monotonic()
        return self._num_bytes


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Create a stream that is independent of other users of the GPU in this process; None for a CPU.

    Waits until all earlier work on the device is done.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.Stream(device)


def finish_stream(stream: torch.cuda.Stream | None) -> None:
    """Wait for the work on the stream. Ignores the error of a lost device."""
    if stream is not None:
        with contextlib.suppress(RuntimeError):
            stream.synchronize()


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Context manager: make `stream` the thread's current stream. None: change nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Context manager: make `device` the thread's current GPU and translate the errors of GPU and host.

    stream   becomes the thread's current stream; None: the current stream stays
    Raises   DeviceLostError if the device cannot be used again. A RuntimeError that says that memory ran out
             becomes a MemoryError, unless it is a torch.OutOfMemoryError. All other exceptions pass through.
    """
    try:
        if device.type != "cuda":
            yield
        else:
            with torch.cuda.device(device), on_stream(stream):
                yield
    except RuntimeError as error:
        if device.type == "cuda" and not is_out_of_memory(error) and _is_lost(device, error):
            raise DeviceLostError(f"{device} reported {first_line(error)}", "its context cannot be used again",
                                  "restart the process") from error
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(first_line(error)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or the host. The device stays usable after such an error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Uploads:
    """Sends host arrays to the device in one copy. The host never waits for a copy.

    The copies read pinned memory, from UPLOAD_BUFFERS buffers that are used in turn. If the next buffer is too small,
    or an earlier copy still reads it, a new buffer replaces it. torch gives the old buffer's memory to another tensor
    only after that copy.

    pinned_bytes   bytes of the buffers; 0 on a CPU, where tensors share the arrays' memory
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._shares_memory, self.pinned_bytes = device, device.type == "cpu", 0
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * UPLOAD_BUFFERS
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device. On a CPU the tensors share the arrays' memory."""
        if self._shares_memory:
            return list(map(torch.from_numpy, arrays))

        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        buffer, copied = self._free_buffer(starts[-1])
        staging = buffer.numpy()
        for array, start in zip(arrays, starts):
            staging[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        target = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        target.copy_(buffer[: starts[-1]], non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        return [target[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
                for array, start in zip(arrays, starts)]

    def into(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Queue a copy of a uint8 array to `target`, a uint8 tensor of the same size on the device.

        The copy runs after the work launched so far. The caller may overwrite `array` as soon as `into` returns.
        """
        if self._shares_memory:
            target.copy_(torch.from_numpy(array))
            return
        buffer, copied = self._free_buffer(array.nbytes)
        buffer.numpy()[: array.nbytes] = array
        target.copy_(buffer[: array.nbytes], non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))

    def _free_buffer(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        index, self._next = self._next, (self._next + 1) % UPLOAD_BUFFERS
        held = self._buffers[index]
        if held is not None and held[0].nbytes >= num_bytes and held[1].query():
            return held
        size = max(1 << 16, 2 * num_bytes)
        self._buffers[index] = (pinned((size,), torch.uint8), torch.cuda.Event())
        self.pinned_bytes += size - (0 if held is None else held[0].nbytes)
        return self._buffers[index]


class CapturedGraph:
    """A CUDA graph: the launches of a function, captured once and replayed in one call.

    memory_of   a graph whose memory pool the new graph shares. Only one of the two graphs may run at a time, and each
                overwrites the other's results in the pool. None: the new graph gets a new pool

    device_type   torch's type of the devices that can capture

    A replay uses the addresses of the capture, and reads their contents at the time of the replay.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device, memory_of: "CapturedGraph | None" = None) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle() if memory_of is None else memory_of._pool

    def capture(self, function: Callable[[], None]) -> None:
        """Capture the function's launches on the current stream, which must not be the default one. Nothing runs.

        Raises RuntimeError if the function does something that cannot be captured, such as copying from unpinned
        memory, waiting or reading results. The capture ends before the exception is raised. Python collects no garbage
        during a capture: a tensor or event that is freed then could end the capture.
        """
        torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()
        try:
            self._capture(function)
        finally:
            if collects:
                gc.enable()

    def _capture(self, function: Callable[[], None]) -> None:
        # The first capture of the process makes tensors for the state of torch's random numbers. In torch 2.9 and 2.10,
        # inference tensors there would make later captures outside of inference mode fail (pytorch issue 166792).
        with torch.inference_mode(False):
            # "thread_local": other threads of the process may use the GPU during the capture.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class Readback:
    """Copies of tensors on their way from the device to the host. `Readbacks.start` makes it.

    host     name -> tensor that has the copy after `buffer.copied`; for those not in `buffer`
    layout   name -> (first byte, dtype, shape) of each tensor in `buffer`
    """

    def __init__(self, readbacks: "Readbacks", host: dict[str, torch.Tensor], buffer: "_ReadbackBuffer | None" = None,
                 layout: Mapping[str, tuple[int, torch.dtype, torch.Size]] = MappingProxyType({}),
                 num_bytes: int = 0) -> None:
        self._readbacks, self._host, self._buffer = readbacks, host, buffer
        self._layout, self._num_bytes = layout, num_bytes

    def wait(self) -> dict[str, np.ndarray]:
        """Wait for the copies and return name -> array. Releases the GIL. Raises the same exceptions as `on_device`.

        Later readbacks do not change the arrays.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            with on_device(self._readbacks.device):
                buffer.copied.synchronize()
            found = buffer.memory[: self._num_bytes].clone()
            self._readbacks.free(buffer)
            for name, (start, dtype, shape) in self._layout.items():
                stop = start + shape.numel() * dtype.itemsize
                self._host[name] = found[start:stop].view(dtype).view(shape)
        return {name: tensor.numpy() for name, tensor in self._host.items()}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _ReadbackBuffer:
    """Pinned memory for one readback at a time, and the event after the copies of this readback."""

    memory: torch.Tensor
    copied: torch.cuda.Event


class Readbacks:
    """Copies tensors from the device to the host. Tensors of up to LARGE_READBACK_BYTES are joined into one copy.

    That copy goes to a pinned buffer with an event of its own. `Readback.wait` copies the results out of the buffer,
    which only then is used again. There are as many buffers as readbacks were in flight at the same time. Larger
    tensors are copied to pinned memory of their own. A readback without a wait takes its buffer along when it is
    dropped: torch gives the memory to another tensor only after the copy.

    pinned_bytes   bytes of the buffers when the newest one was made; 0 on a CPU
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[_ReadbackBuffer] = []
        self._buffers: WeakSet[_ReadbackBuffer] = WeakSet()
        self.pinned_bytes = 0

    def start(self, tensors: dict[str, torch.Tensor], is_reused: bool = False) -> Readback:
        """Queue copies of the tensors after the work launched so far. On a CPU the arrays share the tensors' memory.

        is_reused   whether a later step, possibly launched before `Readback.wait`, overwrites the tensors
        """
        if self.device.type == "cpu":
            return Readback(self, {name: tensor.clone() for name, tensor in tensors.items()} if is_reused else tensors)
        # Large elements first, so that each tensor starts at a multiple of its element size.
        small = sorted((name for name, tensor in tensors.items() if tensor.nbytes <= LARGE_READBACK_BYTES),
                       key=lambda name: -tensors[name].element_size())
        layout, stop = {}, 0
        for name in small:
            layout[name] = stop, tensors[name].dtype, tensors[name].shape
            stop += tensors[name].nbytes
        buffer = self._buffer_of(stop)
        host = {name: _fetch(tensor) for name, tensor in tensors.items() if name not in layout}
        if small:
            parts = [tensors[name].reshape(-1).view(torch.uint8) for name in small]
            buffer.memory[:stop].copy_(parts[0] if len(parts) == 1 else torch.cat(parts), non_blocking=True)
        buffer.copied.record(torch.cuda.current_stream(self.device))
        return Readback(self, host, buffer, layout, stop)

    def free(self, buffer: _ReadbackBuffer) -> None:
        """Use a buffer again. Its contents have been read."""
        self._free.append(buffer)

    def _buffer_of(self, num_bytes: int) -> _ReadbackBuffer:
        if self._free:
            buffer = self._free.pop()
            if buffer.memory.nbytes >= num_bytes:
                return buffer
        # "blocking": the waiting thread sleeps instead of spinning; torch releases the GIL around the wait.
        buffer = _ReadbackBuffer(pinned((max(1 << 16, 2 * num_bytes),), torch.uint8), torch.cuda.Event(blocking=True))
        self._buffers.add(buffer)
        self.pinned_bytes = sum(buffer.memory.nbytes for buffer in self._buffers)
        return buffer


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy of the tensor to pinned memory, and return that memory."""
    return pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned host memory, for asynchronous copies. torch caches freed pinned memory."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _is_lost(device: torch.device, error: RuntimeError) -> bool:
    """Whether the device refuses all further work: an invalid launch, for example, leaves it usable."""
    if not isinstance(error, _ACCELERATOR_ERROR) and "CUDA" not in str(error) and "HIP" not in str(error):
        return False
    try:
        torch.cuda.synchronize(device)              # fails if the context is lost
    except RuntimeError:
        return True
    return False
