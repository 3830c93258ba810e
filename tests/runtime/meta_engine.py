"""The parts of a native backend that run a step, with tensors on torch's "meta" device in place of those on a GPU.

A tensor on the meta device has a shape and no memory. `copies_from_the_host` finds the operations for which the host
would wait on a GPU: each copy from the host that is no upload. An operation that reads a tensor raises on this device.
"""

import contextlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batch_manager.attention.interface import LayerAttention
from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.slots import SlotState
from batch_manager.runtime import packing
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.forms.fixed.form import FixedForm
from batch_manager.runtime.forms.fixed.inputs import FixedInputs
from batch_manager.runtime.forms.fixed.launches import Launches
from batch_manager.runtime.forms.fixed.shapes import captured_shapes, largest_shapes
from batch_manager.runtime.forms.form import traits_of
from batch_manager.runtime.forms.graph.form import GraphForm
from batch_manager.runtime.forms.packed.form import CallsForm, LayersForward, LayersHead
from batch_manager.triton_kernels import dispatch
from batch_manager.triton_kernels.device_limits import DeviceLimits

META, VOCAB, HIDDEN, SIZE, SLOTS, WIDTH = torch.device("meta"), 50, 24, 16, 8, 3
MIXED = {(8, 64)}                     # sizes of steps with contexts that have graphs
KERNEL = dispatch.kernel


class CopiesFromTheHost(TorchDispatchMode):
    """Records operations that take a CPU tensor and take or return a tensor on the device.

    Copies from pinned memory that do not block are left out.
    """

    def __init__(self):
        super().__init__()
        self.found, self._pinned = [], {}

    def pin(self, tensor):
        """Return a copy of a CPU tensor that counts as pinned."""
        copy = tensor.clone()
        self._pinned[copy.data_ptr()] = copy
        return copy

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        made = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        from_host = [value for value in given if value.device.type == "cpu"]
        is_asynchronous = (kwargs or {}).get("non_blocking") and all(value.data_ptr() in self._pinned
                                                                     for value in from_host)
        if from_host and any(value.device == META for value in given + made) and not is_asynchronous:
            self.found.append(str(function))
        return result

    def store(self, tensor, index, value):
        """Record `tensor[index] = value` if torch copies the number `value` to a GPU for it.

        torch fills slices by a kernel. For a single entry, and for an index with tensors, it makes a CPU tensor of the
        number and copies this tensor.
        """
        indices = index if isinstance(index, tuple) else (index,)
        if tensor.device == META and isinstance(value, int | float) and (
                any(isinstance(part, torch.Tensor) for part in indices)
                or len(indices) == tensor.dim() and all(isinstance(part, int | np.integer) for part in indices)):
            self.found.append("a number stored by index")


@contextlib.contextmanager
def copies_from_the_host():
    """Context manager: yield a CopiesFromTheHost that watches all operations of torch, in inference mode."""
    copies, store = CopiesFromTheHost(), torch.Tensor.__setitem__

    def stored(tensor, index, value):
        copies.store(tensor, index, value)
        store(tensor, index, value)

    with pytest.MonkeyPatch.context() as patch, copies, torch.inference_mode():
        patch.setattr(torch.Tensor, "__setitem__", stored)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: copies.pin(tensor))
        yield copies


class CountedUploads:
    def __init__(self):
        self.sent = []

    def send(self, arrays):
        self.sent.append([array.nbytes for array in arrays])
        return [torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=META) for array in arrays]

    def into(self, there, array):
        assert (there.device, there.nbytes) == (META, array.nbytes)
        self.sent.append(array.nbytes)


class Model:
    """A model of one layer with 2 query heads and a KV head."""

    def __init__(self, attention):
        self.attention = attention

    def embed(self, token_ids):
        return torch.empty(len(token_ids), HIDDEN, device=META)

    def forward(self, hidden, positions, attention):
        query, key, value = torch.empty(len(hidden), 4, 8, device=META).split([2, 1, 1], 1)
        attention.run(0, query, key, value, None)
        return hidden

    def logits(self, hidden):
        return torch.empty(len(hidden), VOCAB, device=META)


def stub_kernel(name, device):
    """Stand in for dispatch.kernel: a function that computes nothing and returns results of the right shapes."""
    def run(*args, wants_log_prob=None, **named):
        for value in (*args, *named.values()):
            assert not isinstance(value, torch.Tensor) or value.device == META, f"{name} takes a tensor on the host"
        rows = len(args[0])
        match name:
            case "sample_token":
                return made(rows, torch.int32), made(rows, torch.float32), made(rows, torch.bool)
            case "beam_topk":
                groups = len(args[4]) - 1, args[5]
                return (made(groups, torch.float32), *(made(groups, torch.int32) for _ in range(2)),
                        made(rows, torch.bool))
            case "match_stop_words":
                return made(rows, torch.bool)

    def made(shape, dtype):
        return torch.empty(shape, dtype=dtype, device=META)

    return KERNEL(name, device) if name == "prepare_step" else run


class Engine:
    """The parts of a native backend that run a step, with tensors on the meta device.

    forms   the forms `graph`, whose replays launch kernel by kernel, `fixed` and `packed`
    """

    def __init__(self, monkeypatch):
        triton_paged = pytest.importorskip("batch_manager.attention.triton_paged", reason="triton is not installed")
        monkeypatch.setattr(triton_paged, "device_limits", lambda: DeviceLimits(227 * 1024, 132, True))
        for name in ("rope_kv_append", "paged_attention_context", "paged_attention_decode"):
            monkeypatch.setattr(triton_paged, name, lambda query, *_, **__: query)
        spec = SimpleNamespace(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8,
                               attention=(LayerAttention(scale=1.0),))
        pool = torch.empty(100, 1, 2, 1, SIZE, 8, device=META)
        self.uploads, self.tables = CountedUploads(), BlockTables(SLOTS * WIDTH, 20, copied=(SLOTS, 20))
        self.attention = triton_paged.TritonPagedAttention(spec, pool)
        model = Model(self.attention)
        monkeypatch.setattr(dispatch, "kernel", stub_kernel)
        self.decoder = GptDecoder(SlotState(SLOTS + 1, META, self.uploads.send))
        self.parts = parts = SimpleNamespace(
            device=META, uploads=self.uploads, readbacks=SimpleNamespace(start=lambda tensors, is_reused=False: None),
            tables=self.tables, slots=self.decoder.state, decoder=self.decoder, attention=self.attention,
            num_slots=SLOTS, tokens_per_block=SIZE, vocab_size=VOCAB, adapters=None, clear_entries=None)
        self.inputs = FixedInputs(parts, largest_shapes(SLOTS, MIXED))
        launches = Launches(parts, self.inputs, model, None)
        shapes = captured_shapes(SLOTS, MIXED, self.inputs.may_split)
        self.forms = {"graph": GraphForm(parts, self.inputs, {shape: partial(launches.launch, shape)
                                                              for shape in shapes}),
                      "fixed": FixedForm("fixed", parts, self.inputs, launches),
                      "packed": CallsForm("packed", parts, model, LayersForward(model, self.attention),
                                          LayersHead(model), packing.packed)}

    def run(self, batch):
        """Run the batch as an ordinary step. Return (number of uploads, names of operations that copy otherwise).

        The results of sampling stay in `sampled`.
        """
        self.uploads.sent.clear()
        with copies_from_the_host() as copies:
            self.tables.update(batch)
            self.decoder.set_up((work.slot, work.setup) for work in batch.context)
            self.sampled = self.forms["packed"].start(batch, traits_of(batch, self.parts.slots))._sampled
        assert {tensor.device for tensor in self.sampled.tensors().values()} == {META}
        return len(self.uploads.sent), copies.found

    def obstacle(self, form, batch):
        """Return the bits that keep the batch out of a form."""
        form = self.forms[form]
        return traits_of(batch, self.parts.slots) & ~form.serves or form.misfit(batch)

    def run_in(self, form, batch):
        """Run the batch in a form. Return (bytes of each upload, names of operations that copy otherwise)."""
        self.uploads.sent.clear()
        self.tables.update(batch)
        assert not self.obstacle(form, batch)
        with copies_from_the_host() as copies:
            self.forms[form].start(batch, traits_of(batch, self.parts.slots))
        return self.uploads.sent, copies.found
