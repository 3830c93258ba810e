"""Pretends that the machine has a GPU, to find operations on tensors of two devices without one."""

import torch
from torch.overrides import TorchFunctionMode

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
COPIES_BETWEEN_DEVICES = ("to", "cpu", "cuda", "copy_", "type_as", "deepcopy")
WITHOUT_TENSORS = {int, float, bool, str, slice, torch.dtype, torch.device, type(None), type(...)}
READS_HOST_MEMORY = ("numpy", "__array__")
# Their result has the device of their argument `device`, or is on the CPU.
MAKES_A_TENSOR = ("tensor", "as_tensor", "scalar_tensor")


class PretendedGpu(TorchFunctionMode):
    """A context manager in which tensors with device "cuda" exist. Their memory is on the CPU.

    The `device` of such a tensor is cuda:0. As torch does, an operation raises RuntimeError if it gets tensors of both
    devices, except for a CPU tensor without dimensions, a CPU tensor as an index, and copies. A tensor keeps its device
    as an attribute of the Python object. Only operations that are called from Python within the context are noticed.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.__name__, dict(kwargs or {})
        if name == "__get__":
            return self._property(function, args)
        if name in READS_HOST_MEMORY and is_on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        given = tensors_in((args, kwargs))
        before = {id(tensor) for tensor in given}
        asked, args, kwargs = self._without_device(name, args, kwargs)
        on_gpu = any(map(is_on_gpu, given)) if asked is None else asked
        if asked is None and name in MAKES_A_TENSOR:
            on_gpu = name == "as_tensor" and is_on_gpu(args[0])
        elif name in ("copy_", "__setitem__", "cpu"):
            on_gpu = name != "cpu" and is_on_gpu(args[0])
        if name not in (*COPIES_BETWEEN_DEVICES, *MAKES_A_TENSOR):
            self._refuse_two_devices(name, args, given, on_gpu)
        if (generator := kwargs.get("generator")) is not None and on_gpu:
            raise RuntimeError(f"{name}: expected a 'cuda' device type for generator but found '{generator.device}'")
        if name in COPIES_BETWEEN_DEVICES and name != "copy_" and on_gpu != is_on_gpu(args[0]):
            result = function(*args, **kwargs).clone()
        else:
            result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            if id(tensor) not in before:
                tensor._is_on_gpu = on_gpu
        return result

    @staticmethod
    def _property(getter, args):
        if getter.__self__ is torch.Tensor.device:
            return GPU if is_on_gpu(args[0]) else CPU
        if getter.__self__ is torch.Tensor.is_cuda:
            return is_on_gpu(args[0])
        found = getter(*args)
        if isinstance(found, torch.Tensor):                     # such as the property T
            found._is_on_gpu = is_on_gpu(args[0])
        return found

    @staticmethod
    def _without_device(name, args, kwargs):
        """Return (whether the call asks for the GPU; None: it names no device, args, kwargs), for a call on the CPU."""
        asked = None
        if kwargs.get("device") is not None:
            asked = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = CPU
        if name == "cuda":
            return True, args[:1], kwargs
        if name == "to":
            target = next((value for value in args[1:] if isinstance(value, str | torch.device | torch.Tensor)), None)
            if isinstance(target, torch.Tensor):
                asked = is_on_gpu(target)
            elif target is not None:
                asked = torch.device(target).type == "cuda"
                args = tuple(CPU if value is target else value for value in args)
        return asked, args, kwargs

    @staticmethod
    def _refuse_two_devices(name, args, given, on_gpu):
        if name in ("__getitem__", "__setitem__"):
            value = args[2] if name == "__setitem__" else None
            given = [args[0], *([value] if isinstance(value, torch.Tensor) else [])]
            index = tensors_in(args[1])
            if not is_on_gpu(args[0]):
                given += index
            elif not index:                                     # the value is copied
                given = given[:1]
        if on_gpu or any(map(is_on_gpu, given)):
            alien = [tensor for tensor in given if not is_on_gpu(tensor) and tensor.dim()]
            if alien:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found at least two "
                                   f"devices, cuda:0 and cpu, the latter of shape {list(alien[0].shape)}")


def is_on_gpu(tensor):
    """Whether a tensor was made on the GPU."""
    return getattr(tensor, "_is_on_gpu", False)


def tensors_in(value):
    """Return the tensors in nested lists, tuples and dictionaries."""
    found, parts = [], [value]
    for part in parts:
        if type(part) in WITHOUT_TENSORS:
            continue
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, dict):
            parts.extend(part.values())
        elif isinstance(part, list | tuple):
            parts.extend(part)
    return found
