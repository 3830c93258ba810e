import contextlib

import numpy as np
import pytest
import torch

from batch_manager.attention.interface import LayerAttention
from batch_manager.errors import ConfigError
from batch_manager.models.spec import ModelSpec
from batch_manager.runtime.device import memory as memory_module
from batch_manager.runtime.device import running as device_module
from batch_manager.runtime.device.devices import resolve_device
from batch_manager.runtime.device.memory import free_memory
from batch_manager.runtime.device.running import (
    AllocatedMemory,
    CapturedGraph,
    Readbacks,
    Uploads,
    finish_stream,
    is_out_of_memory,
    make_stream,
    on_device,
)
from batch_manager.runtime.kv_pool import block_bytes, clear_block, make_kv_pool

CPU = torch.device("cpu")
SPEC = ModelSpec(architecture="X", num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, hidden_size=32,
                 intermediate_size=64, vocab_size=100, max_position_embeddings=64,
                 attention=(LayerAttention(scale=8**-0.5),) * 2,
                 norm_epsilon=1e-5, tie_word_embeddings=False, activation="silu", rotary=None)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_device_is_found_by_name():
    assert resolve_device("cpu") == CPU and resolve_device("cpu:0") == CPU
    with pytest.raises(ConfigError, match="device is 'cpu:3'; expected \"cpu\" or \"cpu:0\""):
        resolve_device("cpu:3")
    if not torch.cuda.is_available():
        assert resolve_device(None) == CPU
        with pytest.raises(ConfigError, match="torch finds 0 GPUs"):
            resolve_device("cuda")


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", "", 3])
def test_a_device_that_is_none_of_ours_is_refused(name):
    with pytest.raises(ConfigError, match="device is"):
        resolve_device(name)


def test_free_host_memory_is_a_plausible_number():
    assert 2**20 < free_memory(CPU) < 2**50


@pytest.mark.parametrize("used, statistics, expected", [
    (900_000, "anon 600000\ninactive_file 250000\nactive_file 50000\nshmem 7", 400_000),
    (999_999, "anon 999999", 1), (1_000_001, "anon 1000001", 0)])
def test_the_page_cache_of_a_control_group_is_free(used, statistics, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_module, "CONTROL_GROUP", tmp_path)
    for name, text in (("memory.max", "1000000"), ("memory.current", str(used)), ("memory.stat", statistics)):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(CPU) == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) > 2**20


def test_out_of_memory_is_told_apart_from_other_errors():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("a shape is wrong")) and not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_a_cpu_that_is_out_of_memory_raises_a_memory_error():
    with pytest.raises(MemoryError), on_device(CPU):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="something else"), on_device(CPU):
        raise RuntimeError("something else")


ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("error, answers, lost", [
    (RuntimeError(ILLEGAL), False, True),
    (torch.AcceleratorError(ILLEGAL, 700), False, True),
    (torch.AcceleratorError("CUDA error: invalid configuration argument", 9), True, False),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False, False),
    (torch.OutOfMemoryError("CUDA out of memory"), False, False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
])
def test_a_gpu_is_lost_when_it_cannot_even_synchronize(monkeypatch, error, answers, lost):
    def synchronize(_):
        if not answers:
            raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(device_module.torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(device_module.torch.cuda, "device", lambda _: contextlib.nullcontext())
    with pytest.raises(Exception) as raised, on_device(torch.device("cuda", 0)):
        raise error
    assert (type(raised.value).__name__ == "DeviceLostError") is lost


def test_a_stream_is_made_behind_what_was_launched_and_is_the_current_one_on_its_device(monkeypatch):
    log, gpu = [], torch.device("cuda", 0)

    @contextlib.contextmanager
    def entering(name, of):
        log.append((name, of))
        yield
        log.append(("left", of))

    monkeypatch.setattr(device_module.torch.cuda, "synchronize", lambda of: log.append(("waited", of)))
    monkeypatch.setattr(device_module.torch.cuda, "Stream", lambda of: log.append(("made", of)) or "the stream")
    monkeypatch.setattr(device_module.torch.cuda, "device", lambda of: entering("device", of))
    monkeypatch.setattr(device_module.torch.cuda, "stream", lambda of: entering("stream", of))
    with on_device(gpu, make_stream(gpu)):
        log.append("work")
    assert log == [("waited", gpu), ("made", gpu), ("device", gpu), ("stream", "the stream"), "work",
                   ("left", "the stream"), ("left", gpu)]
    assert make_stream(CPU) is None


def test_finishing_a_stream_waits_for_it_and_takes_a_lost_device_for_finished():
    class Stream:
        waits = 0

        def synchronize(self):
            Stream.waits += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    finish_stream(Stream())
    finish_stream(None)
    assert Stream.waits == 1


def test_a_gpus_memory_is_asked_for_at_most_once_a_second(monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(device_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(device_module.torch.cuda, "memory_allocated", lambda of: asked.append(now[0]) or len(asked))
    memory, found = AllocatedMemory(torch.device("cuda", 0)), []
    for now[0] in (100.0, 100.5, 100.999, 101.0, 101.5, 107.0):
        found.append(memory.num_bytes())
    assert asked == [100.0, 101.0, 107.0] and found == [1, 1, 1, 2, 2, 3]
    assert AllocatedMemory(CPU).num_bytes() == 0 and len(asked) == 3


def test_uploads_and_readbacks_on_a_cpu_copy_nothing():
    array = np.arange(5)
    [tensor] = Uploads(CPU).send([array])
    assert tensor.data_ptr() == array.ctypes.data
    assert Readbacks(CPU).start({"x": tensor}).wait()["x"].ctypes.data == array.ctypes.data


class FakeEvent:
    """An event that has happened if `is_done` is true."""

    is_done = True

    def record(self, stream):
        pass

    def query(self):
        return FakeEvent.is_done

    def synchronize(self):
        pass


@pytest.mark.parametrize("is_done", [False, True])
def test_an_upload_in_one_copy_keeps_values_types_and_shapes(monkeypatch, is_done):
    monkeypatch.setattr(FakeEvent, "is_done", is_done)
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: pytest.fail("an upload waited"))
    monkeypatch.setattr(device_module, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(device_module.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(device_module.torch.cuda, "current_stream", lambda _: None)
    uploads = Uploads(CPU)
    uploads._shares_memory = False
    sent = []
    for size in (3, 5, 40_000, *range(1, 9)):
        arrays = [np.arange(size), np.empty(0, np.int64), np.arange(size, dtype=np.int32)[::2],
                  np.arange(2 * size, dtype=np.float32).reshape(2, size), np.array([True] * size)]
        sent.append((arrays, uploads.send(arrays)))
    for arrays, tensors in sent:                                    # later uploads do not change earlier ones
        for array, tensor in zip(arrays, tensors):
            assert tensor.shape == array.shape and tensor.numpy().dtype == array.dtype
            assert np.array_equal(tensor.numpy(), array)
    # A buffer that an earlier copy may still read is replaced, and a large one is kept otherwise.
    assert (uploads.pinned_bytes > 2 * 40_000 * 8) == is_done


@pytest.mark.parametrize("large_bytes, copies", [(1 << 20, 1), (500, 2), (0, 1 + 7)])
def test_what_a_step_reads_back_is_one_copy_but_for_large_tensors(monkeypatch, large_bytes, copies):
    made = []

    def pinned(shape, dtype):
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(device_module, "LARGE_READBACK_BYTES", large_bytes)
    monkeypatch.setattr(device_module, "pinned", pinned)
    monkeypatch.setattr(device_module.torch.cuda, "Event", lambda blocking: FakeEvent())
    for name in ("current_stream", "device"):
        monkeypatch.setattr(device_module.torch.cuda, name, lambda _: contextlib.nullcontext())
    flags = torch.tensor([True, False, True])
    tensors = {"finite": flags, "tokens": torch.arange(3, dtype=torch.int32), "finish": flags.view(torch.uint8),
               "log_probs": torch.randn(3), "beams": torch.randn(3, 2).T, "wide": torch.tensor(7),
               "logits": torch.randn(2, 100)}
    expected = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    readbacks = Readbacks(torch.device("cuda", 0))
    readback = readbacks.start(tensors)
    for tensor in tensors.values():
        tensor.zero_()                                              # the next step overwrites them
    arrays = readback.wait()
    assert len(made) == copies and arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype and np.array_equal(array, expected[name])
    assert readbacks.start({}).wait() == {}


@pytest.fixture
def calls_of_graphs(monkeypatch):
    """Return a list of the calls that CapturedGraph makes in torch. Nothing is captured.

    An entry has the name of the function first. "begin" has the pool, the mode of errors, and whether torch is in
    inference mode.
    """
    calls, pools = [], iter(("the first pool", "another pool"))

    class Graph:
        ends_in_an_error = False

        def capture_begin(self, pool, capture_error_mode):
            calls.append(("begin", pool, capture_error_mode, torch.is_inference_mode_enabled()))

        def capture_end(self):
            calls.append(("end",))
            if Graph.ends_in_an_error:
                raise RuntimeError("the capture was invalidated")

        def replay(self):
            calls.append(("replay",))

    monkeypatch.setattr(device_module.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(device_module.torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(device_module.torch.cuda, "synchronize", lambda of: calls.append(("synchronize", of)))
    return calls


def launches(calls):
    return lambda: calls.append(("launch", torch.is_inference_mode_enabled()))


def test_a_capture_waits_and_leaves_other_threads_free_and_graphs_share_a_pool(calls_of_graphs):
    gpu = torch.device("cuda", 0)
    with torch.inference_mode():
        first = CapturedGraph(gpu)
        for graph in (first, CapturedGraph(gpu, memory_of=first)):
            graph.capture(launches(calls_of_graphs))
    expected = [("synchronize", gpu), ("begin", "the first pool", "thread_local", False), ("launch", True), ("end",)]
    assert calls_of_graphs == 2 * expected
    CapturedGraph(gpu).capture(launches(calls_of_graphs))
    assert calls_of_graphs[-3:] == [("begin", "another pool", "thread_local", False), ("launch", False), ("end",)]
    calls_of_graphs.clear()
    first.replay()
    assert calls_of_graphs == [("replay",)]


@pytest.mark.parametrize("ends_in_an_error", [False, True])
@pytest.mark.parametrize("fault", [RuntimeError("operation not permitted"), KeyboardInterrupt()])
def test_a_capture_that_raises_is_ended_first_and_its_own_error_is_raised(calls_of_graphs, monkeypatch, fault,
                                                                          ends_in_an_error):
    monkeypatch.setattr(device_module.torch.cuda.CUDAGraph, "ends_in_an_error", ends_in_an_error)

    def fail():
        raise fault

    with pytest.raises(type(fault)) as raised:
        CapturedGraph(torch.device("cuda", 0)).capture(fail)
    assert raised.value is fault and [name for name, *_ in calls_of_graphs] == ["synchronize", "begin", "end"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pool_has_the_documented_shape_and_is_aligned_and_zero(dtype):
    pool = make_kv_pool(SPEC, 5, 16, dtype, CPU)
    assert pool.shape == (5, 2, 2, 2, 16, 8) and pool.dtype == dtype and pool.is_contiguous()
    assert pool.data_ptr() % 64 == 0 and not pool.any()
    assert pool[0].nbytes == block_bytes(SPEC, 16, dtype)


def test_clearing_blocks_leaves_the_others_alone():
    pool = make_kv_pool(SPEC, 4, 8, torch.float32, CPU)
    pool.fill_(torch.nan)
    clear_block(pool, 2)
    clear_block(pool, 0)
    clear_block(pool, 3, 5)
    assert not pool[[0, 2]].any() and pool[1].isnan().all()
    assert pool[3, :, :, :, :5].isnan().all() and not pool[3, :, :, :, 5:].any()


def test_pages_that_nobody_wrote_take_no_memory():
    before = resident_bytes()
    pool = make_kv_pool(SPEC, 2**28 // block_bytes(SPEC, 16, torch.float32), 16, torch.float32, CPU)
    assert pool.nbytes > 2**27 and resident_bytes() - before < 2**25
