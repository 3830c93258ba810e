"""On a pretended GPU, no kernel test mixes tensors of two devices, which a run on a CPU would not notice."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.campaigns.ahead_of_time import record_calls

HERE = Path(__file__).parent
KERNELS = {path.stem for path in (HERE.parents[1] / "triton_kernels" / "reference").glob("[a-z]*.py")}


@pytest.fixture
def on_gpu():
    """Pretend to have a GPU during the test. Return a function that makes a float32 tensor of the values on it."""
    spec = importlib.util.spec_from_file_location("pretended_gpu", HERE / "pretended_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.PretendedGpu():
        yield lambda *values: torch.tensor(values, dtype=torch.float32, device="cuda")


def test_kernel_tests_keep_all_tensors_of_an_operation_on_one_device(tmp_path):
    """Campaign T18 runs the tests with all combinations of parameters."""
    record_calls(tmp_path / "calls", each_value_once=True)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {call["module"] for call in calls} == KERNELS and len(calls) > 500


@pytest.mark.parametrize("operation", [
    lambda gpu, cpu: gpu + cpu, lambda gpu, cpu: cpu - gpu, lambda gpu, cpu: gpu[1:] * cpu[:1],
    lambda gpu, cpu: gpu @ cpu, lambda gpu, cpu: gpu.add_(cpu), lambda gpu, cpu: torch.cat([gpu, cpu]),
    lambda gpu, cpu: torch.where(gpu > 1, gpu, cpu), lambda gpu, cpu: gpu.index_select(0, cpu.long()),
    lambda gpu, cpu: cpu[gpu.long() - 1], lambda gpu, cpu: gpu.__setitem__(cpu.long() - 1, cpu),
    lambda gpu, cpu: torch.equal(gpu, cpu), lambda gpu, cpu: torch.zeros_like(gpu) + torch.zeros_like(cpu),
    lambda gpu, cpu: gpu[None].T + cpu, lambda gpu, cpu: gpu.new_tensor([1.0, 2.0]) + cpu,
    lambda gpu, cpu: torch.randn(2, generator=torch.Generator(), device=gpu.device)])
def test_an_operation_on_both_devices_raises_as_on_a_gpu(on_gpu, operation):
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device|type for generator"):
        operation(on_gpu(1, 2), torch.tensor([1.0, 2.0]))


def test_comparing_and_reading_tensors_of_a_gpu_raises_as_on_one(on_gpu):
    with pytest.raises(AssertionError, match="device"):
        torch.testing.assert_close(on_gpu(1, 2), torch.tensor([1.0, 2.0]))
    for read in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="device type tensor to numpy"):
            read(on_gpu(1, 2))


def test_copies_indices_and_numbers_may_come_from_the_cpu(on_gpu):
    gpu, cpu = on_gpu(1, 2), torch.tensor([3.0, 4.0])
    assert (gpu + cpu[0]).tolist() == [4, 5] and gpu[cpu.long() - 3].device.type == "cuda"
    assert gpu.to("cpu").device.type == gpu.cpu().device.type == "cpu" and gpu.to(torch.float64).is_cuda
    moved = cpu.to(gpu.device)
    moved += gpu
    assert moved.tolist() == [4, 6] and cpu.tolist() == [3, 4], "a copy to another device has its own memory"
    gpu[1:] = cpu[1:]
    assert gpu.copy_(cpu).is_cuda and gpu.cpu().numpy().tolist() == [3, 4]
    assert torch.arange(3, device="cuda").device == gpu.device != torch.arange(3).device
