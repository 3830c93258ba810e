import importlib

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.slots import SamplingRows, SlotState
from batch_manager.triton_kernels import dispatch

CPU = torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, because more threads are slower with small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle_of(name, device):
    return getattr(importlib.import_module(f"{dispatch.__package__}.reference.{name}"), name)


@pytest.fixture(params=["as on a CPU", "with oracles"])
def way(request, monkeypatch):
    """Run each test twice: with the kernels' CPU forms, and with their oracles in place of the CPU forms."""
    if request.param == "with oracles":
        monkeypatch.setattr(dispatch, "kernel", oracle_of)
    return request.param


@pytest.fixture
def decoder_with(way):
    """decoder_with(setup, ...) returns a GptDecoder in which the setups are in slots 0, 1, ..."""
    def make(*setups, num_slots=None, own_stages=()):
        decoder = GptDecoder(SlotState(num_slots or max(len(setups), 1), CPU), own_stages)
        decoder.set_up(enumerate(setups))
        return decoder

    return make


@pytest.fixture
def rows_of():
    """rows_of(slots, positions) returns SamplingRows: each row's slot and the position of the token to sample."""
    def make(slots, positions):
        slots, positions = np.array(slots, np.int32), np.array(positions, np.int32)
        return SamplingRows(slots, positions, torch.from_numpy(slots).long(), torch.from_numpy(positions).long())

    return make
