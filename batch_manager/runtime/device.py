"""The device a step runs on: memory, uploads, waiting, what its errors mean. The only file that names torch.cuda."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import ConfigError, DeviceLostError

MEMORY_SECONDS = 1.0               # for which the statistics take a GPU's memory to be what it was
UPLOAD_BUFFERS = 3                 # so that a buffer is not written while an earlier step's copy still reads it
LARGE_READBACK_BYTES = 1 << 20     # tensors of more than that are read back by themselves: joining them copies them
ALIGNMENT = 16                     # bytes; of each array within an upload
CONTROL_GROUP = Path("/sys/fs/cgroup")    # this process's, where it is in a container

_ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", ())


def resolve_device(name: str | None) -> torch.device:
    """ "cuda", "cuda:1" or "cpu"; None: a GPU where there is one. Raises ConfigError."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = named_device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if device.index is None and count == 0 else device.index
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"device is {name!r} and torch finds {count} GPUs", "a device that is there",
                          'use device="cpu", or install a driver and a build of torch that see the GPU')
    return torch.device("cuda", index)


def named_device(name: str) -> torch.device:
    """The device of a name, whether it is there or not. Raises ConfigError for a name that none has."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}", 'one of "cpu", "cuda", "cuda:1", ..., or None',
                          "leave it out for a GPU where there is one")
    return device


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated: what torch has cached but does not use counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_host_memory()


def used_memory(device: torch.device) -> int:
    """Bytes of a GPU that are not free, as its driver says, when what was launched is done; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def device_name(device: torch.device) -> str:
    """For logs."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


class AllocatedMemory:
    """What torch holds on a GPU in this process; 0 bytes for a CPU.

    Torch takes 50 microseconds to say it, as long as much of an iteration, and every iteration has statistics: so it is
    asked once in MEMORY_SECONDS, and the answer is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._num_bytes, self._asked_at = device, 0, -math.inf

    def num_bytes(self) -> int:
        """As it was at most MEMORY_SECONDS ago."""
        if self._device.type == "cuda" and time.monotonic() - self._asked_at >= MEMORY_SECONDS:
            self._num_bytes, self._asked_at = torch.cuda.memory_allocated(self._device), time.monotonic()
        return self._num_bytes


def release_memory(device: torch.device) -> None:
    """Give unused memory back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that shares no order with other users of the GPU in this process; None for a CPU.

    What was launched on the device before is done when this returns.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.Stream(device)


def finish_stream(stream: torch.cuda.Stream | None) -> None:
    """Wait for what was launched on the stream. On a device that is lost there is nothing to wait for."""
    if stream is not None:
        with contextlib.suppress(RuntimeError):
            stream.synchronize()


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Run with the stream as the thread's current one of its device; None: as it is."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Run with this GPU as the thread's current one, and with its errors in the words of the rest of the package.

    stream   becomes the thread's current one of the device; None: the current one stays
    Raises   DeviceLostError where nothing can run on the device any more; MemoryError where a CPU ran out of memory.
             Everything else, torch's out-of-memory errors of a GPU among it, passes through.
    """
    try:
        if device.type != "cuda":
            yield
        else:
            with torch.cuda.device(device), on_stream(stream):
                yield
    except RuntimeError as error:
        if device.type == "cuda" and not is_out_of_memory(error) and _is_lost(device, error):
            raise DeviceLostError(f"{device} reports {first_line(error)}", "its context cannot be used again",
                                  "restart the process") from error
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(first_line(error)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on a GPU or on the host; the device can be used on."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Uploads:
    """Brings the arrays of a step to the device, in one copy that the host does not wait for.

    pinned_bytes   host memory held for it; on a CPU there is none, the tensors are the arrays
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._shares_memory, self.pinned_bytes = device, device.type == "cpu", 0
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * UPLOAD_BUFFERS
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays as tensors on the device. On a CPU they share the arrays' memory."""
        if self._shares_memory:
            return list(map(torch.from_numpy, arrays))

        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        buffer, copied = self._free_buffer(starts[-1])
        staging = buffer.numpy()
        for array, start in zip(arrays, starts):
            staging[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        there = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        there.copy_(buffer[: starts[-1]], non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        return [there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
                for array, start in zip(arrays, starts)]

    def into(self, there: torch.Tensor, array: np.ndarray) -> None:
        """The bytes of an array to a tensor of uint8 on the device, of the same length, after what was launched so
        far. The array may be written again at once."""
        if self._shares_memory:
            there.copy_(torch.from_numpy(array))
            return
        buffer, copied = self._free_buffer(array.nbytes)
        buffer.numpy()[: array.nbytes] = array
        there.copy_(buffer[: array.nbytes], non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))

    def _free_buffer(self, num_bytes: int):
        index, self._next = self._next, (self._next + 1) % UPLOAD_BUFFERS
        held = self._buffers[index]
        if held is not None:
            held[1].synchronize()
            if held[0].nbytes >= num_bytes:
                return held
        size = max(1 << 16, 2 * num_bytes)
        self._buffers[index] = (pinned((size,), torch.uint8), torch.cuda.Event())
        self.pinned_bytes += size - (0 if held is None else held[0].nbytes)
        return self._buffers[index]


class CapturedGraph:
    """What a function launches, recorded once and launched again in one call.

    memory_of   a graph whose memory for what the function allocates serves this one too: only one of them may be
                running, and nothing that one leaves there is read after the other has run. None: memory of its own

    Recorded are launches with their arguments: the addresses are those of the capture, whatever they hold by then.
    """

    def __init__(self, device: torch.device, memory_of: "CapturedGraph | None" = None) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle() if memory_of is None else memory_of._pool

    def capture(self, function: Callable[[], None]) -> None:
        """Record what the function launches on the current stream, which is not the default one. Nothing runs.

        Raises RuntimeError where the function does what cannot be recorded: copies from memory that is not pinned,
        waits, reads results. The stream records no more then.
        """
        torch.cuda.synchronize(self._device)
        # Other threads of the process go on with the GPU meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def replay(self) -> None:
        """Launch all of it, after what the current stream has."""
        self._graph.replay()


class Readback:
    """Tensors on their way from the device to the host: the small ones, of which every step has some, in one copy.

    is_reused   the tensors are written again by a later step, which may be launched before these are read
    """

    def __init__(self, device: torch.device, tensors: dict[str, torch.Tensor], is_reused: bool = False) -> None:
        self._device, self._done = device, None
        if device.type == "cpu":
            self._host = {name: tensor.clone() for name, tensor in tensors.items()} if is_reused else tensors
            return
        # Large elements first: then each tensor begins at a multiple of what its elements take.
        small = sorted((name for name, tensor in tensors.items() if tensor.nbytes <= LARGE_READBACK_BYTES),
                       key=lambda name: -tensors[name].element_size())
        parts = [tensors[name].reshape(-1).view(torch.uint8) for name in small]
        block = _fetch(parts[0] if len(parts) == 1 else torch.cat(parts)) if small else None
        self._host, start = {}, 0
        for name, tensor in tensors.items():
            if name not in small:
                self._host[name] = _fetch(tensor)
        for name in small:
            tensor, stop = tensors[name], start + tensors[name].nbytes
            self._host[name], start = block[start:stop].view(tensor.dtype).view(tensor.shape), stop
        # "blocking": the waiting thread sleeps instead of spinning; torch releases the GIL around the wait.
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> dict[str, np.ndarray]:
        """The arrays, once the device has produced them. Other Python threads run meanwhile. Raises as `on_device`."""
        if self._done is not None:
            with on_device(self._device):
                self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory that the tensor is being copied to."""
    return pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that a GPU can copy from and to while the host goes on; torch keeps it for the next time."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _is_lost(device: torch.device, error: RuntimeError) -> bool:
    if isinstance(error, _ACCELERATOR_ERROR):
        return True
    if "CUDA" not in str(error) and "HIP" not in str(error):
        return False
    try:
        torch.cuda.synchronize(device)              # a lost context fails at everything, this included
    except RuntimeError:
        return True
    return False


def _free_host_memory() -> int:
    """MemAvailable, or what a control group leaves where that is less: its page cache can be had, as the system's."""
    free = _meminfo_available()
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        page_cache = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
        return max(0, min(free, limit - used + page_cache))
    except (OSError, ValueError):                   # no control group, or no limit in it
        return free


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
