import logging
import sys
import types

import pytest
import torch

from batch_manager.triton_kernels import dispatch


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._decide.cache_clear()
    yield
    dispatch._decide.cache_clear()


def test_a_cpu_runs_torch_and_a_gpu_triton():
    assert not dispatch.use_triton("cpu") and dispatch.kernel_backend(torch.device("cpu")) == "torch"
    assert dispatch.use_triton(torch.device("cuda", 1)) and dispatch.kernel_backend("cuda:0") == "triton"


def test_a_gpu_without_triton_runs_torch(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert dispatch.kernel_backend("cuda") == "torch"


@pytest.mark.parametrize("value, backend", [("1", "triton"), ("true", "triton"), ("0", "torch"), ("", "torch")])
def test_the_interpreter_counts_as_triton(monkeypatch, value, backend):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert dispatch.kernel_backend("cpu") == backend


def test_the_decision_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(3):
            dispatch.use_triton("cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "operations on cpu devices run in torch (no Triton kernels for a cpu device)"
    ]


@pytest.mark.parametrize("name, device, folder", [
    ("rms_norm", "cpu", ".cpu"), ("rms_norm", torch.device("cpu"), ".cpu"), ("rms_norm", "meta", ".reference"),
    ("paged_attention_merge", "cpu", ".reference")])
def test_a_function_is_found_by_its_name(name, device, folder):
    """Without Triton, `kernel(name, device)` returns the CPU form if the device is a CPU and there is a CPU form.

    Otherwise it returns the oracle.
    """
    found = dispatch.kernel(name, device)
    assert found.__module__ == f"batch_manager.triton_kernels{folder}.{name}"
    assert found is getattr(sys.modules[found.__module__], name)


def test_a_kernel_is_tritons_where_triton_runs(monkeypatch):
    """With TRITON_INTERPRET=1, the kernel is used on a CPU too, so that it can be debugged."""
    imported = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.import_module", lambda module: imported.append(module) or types.SimpleNamespace(
        rms_norm="the kernel"))
    assert dispatch.kernel("rms_norm", "cpu") == "the kernel"
    assert imported == ["batch_manager.triton_kernels.rms_norm"]
