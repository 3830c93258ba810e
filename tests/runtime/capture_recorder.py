"""Imitates the capture and replay of CUDA graphs on a CPU, for torch operations and interpreted Triton kernels.

A graph can replace a step only if two steps of one shape launch the same operations in the same order, with the same
grids, numbers, sizes and addresses. `Recorder.entries` describes the launches, so that tests can compare two steps.
`Recorder.refusals` names the operations that a capture would refuse. `Recorder.replay` runs the recorded operations
again, with the recorded arguments, in the same memory.
"""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# Operations that read the device, or make a tensor from host memory.
REFUSED = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique", "aten.is_nonzero",
           "aten.equal", "aten.lift_fresh", "aten._pin_memory")
READING_METHODS = ("tolist", "numpy", "item", "cpu")


def storage_of(tensor):
    """Return a key of a tensor's memory: the address, or the id of the tensor object if the tensor is packed."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else f"packed {id(tensor)}"


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """A context manager that records the torch operations and kernel launches within it.

    entries    descriptions of all operations and launches, in order
    launches   names of the launched kernels, and of the operations that write memory
    refusals   names of the operations that a capture would refuse
    """

    def __init__(self):
        super().__init__()
        self.entries, self.launches, self.refusals, self.is_launching = [], [], [], False
        self._calls, self._made, self._held = [], {}, []

    def __enter__(self):
        # isinstance would read __class__, which changes some objects.
        self._kept = {storage_of(value) for value in gc.get_objects()
                      if issubclass(type(value), torch.Tensor)}
        self._restore = _patch(self)
        return super().__enter__()

    def __exit__(self, *error):
        for owner, name, before in self._restore:
            setattr(owner, name, before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(function)
        if name.startswith(REFUSED) or name.startswith("aten.index.") and any(
                tensor.dtype == torch.bool for tensor in tensors_in(args[1])):
            self.refusals.append(name)
        entry = name, self._described((args, kwargs))
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = function(*args, **kwargs)
        made = [tensor for tensor in tensors_in(result) if storage_of(tensor) not in given]
        for tensor in made:
            self._made[storage_of(tensor)] = len(self.entries)
        self._held.append((args, kwargs, result))       # so that no other tensor reuses the memory
        self.entries.append(entry)
        if function._schema.is_mutable or made and "empty" not in name:
            self.launches.append(name)
        self._calls.append((lambda: function(*args, **kwargs), made if "empty" not in name else []))
        return result

    def launch(self, run, executor, args, kwargs):
        """Record the launch of a Triton kernel, and run the kernel by `run(executor, *args, **kwargs)`.

        run        the interpreter's function that launches a kernel
        executor   the interpreter's object for the kernel and its grid
        """
        with _disable_current_modes():
            self.launches.append(executor.fn.__name__)
            self.entries.append((executor.fn.__name__, executor.grid, self._described((args, kwargs))))
            self._held.append((args, kwargs))
            self._calls.append((lambda: run(executor, *args, **kwargs), []))
            self.is_launching = True                    # the interpreter reads tensors, unlike a GPU
            try:
                return run(executor, *args, **kwargs)
            finally:
                self.is_launching = False

    def replay(self):
        with torch.inference_mode():
            for call, made in self._calls:
                for before, now in zip(made, tensors_in(call())):
                    before.copy_(now)

    def _described(self, tree):
        return str(tree_map(self._describe, tree))

    def _describe(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        storage = storage_of(value)
        if value.layout != torch.strided:
            return storage
        if storage in self._made:
            where = f"made by {self._made[storage]} + {value.storage_offset()}"
        elif storage in self._kept:
            where = f"at {value.data_ptr():#x}"
        else:
            where = "new from the host"
            self.refusals.append(where)
        return f"{value.dtype} {list(value.shape)} {list(value.stride())} {where}"


def _patch(recorder):
    """Patch kernel launches, and the methods by which the host reads a tensor, so that `recorder` notices them.

    Returns the replaced attributes, to restore them: [(owner, name, value)].
    """
    patches = []

    def patch(owner, name, make):
        before = getattr(owner, name)
        patches.append((owner, name, before))
        setattr(owner, name, make(before))

    def refused(before):
        def read(tensor, *args, **kwargs):
            if not recorder.is_launching:
                recorder.refusals.append(before.__name__)
            return before(tensor, *args, **kwargs)
        return read

    for name in READING_METHODS:
        patch(torch.Tensor, name, refused)
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return patches
    patch(GridExecutor, "__call__", lambda run: lambda executor, *args, **kwargs: recorder.launch(
        run, executor, args, kwargs))
    return patches


class ReplayedGraph:
    """A stand-in for device.CapturedGraph that captures and replays steps on a CPU with a Recorder.

    captured   shapes of all captured steps
    replayed   shapes of all replayed steps
    """

    device_type = "cpu"
    captured, replayed = [], []

    def __init__(self, device, memory_of=None):
        self.memory_of, self._recorder = memory_of, Recorder()

    def capture(self, function):
        with self._recorder:
            function()
        if self._recorder.refusals:
            raise RuntimeError(f"a capture refuses {self._recorder.refusals}")
        self._shape = function.args[0]
        ReplayedGraph.captured.append(self._shape)

    def replay(self):
        self._recorder.replay()
        ReplayedGraph.replayed.append(self._shape)
