"""Code that runs in a step does not make the host wait for the device. The exceptions are named here, with reasons."""

import ast
from functools import cache

import pytest

from .test_structure import KERNELS, PACKAGE, REPOSITORY, report
from .waits import Types, waits

IN_A_STEP = ("decoding", "runtime", "attention", "layers", "models")
# A file, or (file, function) -> why the host may wait there.
LOADING = "runs while the engine is loaded"
ALLOWED: dict[str | tuple[str, str], str] = {
    ("batch_manager/runtime/device/running.py", "Readback.wait"): "the one wait of a step, for its results",
    ("batch_manager/runtime/device/running.py", "_is_lost"): "runs after an error of the device",
    ("batch_manager/runtime/device/running.py", "finish_stream"): "runs while the engine is closed",
    ("batch_manager/runtime/native_backend.py", "OperationsAlone.finish"): "an idle engine copies blocks for a store",
    **dict.fromkeys([("batch_manager/runtime/device/running.py", "make_stream"),
                     ("batch_manager/runtime/device/running.py", "CapturedGraph.capture"),
                     ("batch_manager/runtime/device/memory.py", "used_memory"),
                     ("batch_manager/runtime/forms/comparison.py", "describe_difference"),
                     ("batch_manager/runtime/kv_pool.py", "make_host_pool"),
                     ("batch_manager/runtime/adapters/port.py", "LoraPort.of"),
                     ("batch_manager/layers/weight_form.py", "quantised"),
                     ("batch_manager/layers/weight_form.py", "_read_by_compiled_code"),
                     ("batch_manager/layers/levels_matrix.py", "_read"),
                     ("batch_manager/layers/levels_matrix.py", "_repeated"),
                     ("batch_manager/models/alibi_slopes.py", "_powers"),
                     ("batch_manager/models/falcon.py", "Falcon.read_spec"),
                     "batch_manager/models/transformers/load_check.py",
                     "batch_manager/models/transformers/mask_reading.py"], LOADING),
    "triton_kernels/interpreter.py": "runs in the interpreter, whose values are NumPy arrays",
    ("batch_manager/decoding/logits_return.py", "context_logits"):
        "the logits of a prompt may be too large for the device, which computes and returns them in pieces",
    ("batch_manager/layers/experts.py", "Experts._sum"):
        "without Triton's kernels, each expert multiplies as many rows as chose it",
    ("batch_manager/runtime/kv_pool.py", "_bytes_of"): "for blocks on a CPU",
    ("batch_manager/decoding/decoder.py", "GptDecoder.sample_largest"): "for compiled steps, which run on a CPU",
    **dict.fromkeys([("batch_manager/runtime/ranks/backend.py", name) for name in ("RunLayers.finish", "input_tokens")],
                    "ranks run each step after the one before was read, and rank 0 sends its tokens to the others"),
    **dict.fromkeys(["batch_manager/attention/torch_paged.py", "batch_manager/attention/torch_fixed_tiles.py"],
                    "for a CPU; on a GPU it replaces the kernels only if triton is not installed"),
}


def allowance(file, function):
    """Return the key of ALLOWED that allows a function to wait, or None."""
    return next((key for key in (file, (file, function)) if key in ALLOWED), None)


@cache
def trees():
    """Return {file: its syntax tree} of what runs in a step."""
    return {path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in [*(path for folder in IN_A_STEP for path in sorted((PACKAGE / folder).rglob("*.py"))),
                         *sorted(KERNELS.glob("*.py")), PACKAGE / "extras" / "guided_decoding.py"]}


@cache
def types():
    return Types.of(trees().values())


@cache
def found():
    """Return (file, function, line, what waits) of each place where the host waits for the device."""
    return [(file, *place) for file, tree in trees().items() for place in waits(tree, types())]


def test_the_host_waits_for_the_device_only_where_this_file_allows_it():
    wrong = [f"{file}:{line} {function}: {what}" for file, function, line, what in found()
             if allowance(file, function) is None]
    assert not wrong, report([*wrong, "send arrays with Uploads.send (SlotState.send, LogitsRows.send)"])


def test_each_permission_to_wait_is_used():
    assert set(ALLOWED) == {allowance(file, function) for file, function, _, _ in found()} - {None}


KNOWN = ast.parse("""
class Rows:
    device_slots: torch.Tensor
    slots: np.ndarray
    def column(self) -> torch.Tensor: ...
""")


@pytest.mark.parametrize("line", [
    "logits.item()", "float(logits.amax())", "bool(rows.column().any())", "logits.tolist()",
    "rows.device_slots.tolist()", "rows.column().cpu()", "logits.argmax(1).numpy()", "logits.nonzero()",
    "torch.nonzero(logits)", "np.asarray(logits)",
    "torch.from_numpy(array).to(logits.device)", "torch.from_numpy(array).to(self._device)", "logits.to('cuda')",
    "torch.from_numpy(array).to(device=device)", "torch.from_numpy(array).cuda()", "logits.new_tensor([1, 2])",
    "torch.tensor([1, 2], device=logits.device)", "torch.as_tensor(array, device=device)", "logits[logits > 0]",
    "logits[~(rows.column() > 1) & rows.column().isnan()]", "logits[0, logits[0].isfinite()]",
    "mask = logits > 0\nlogits[mask] = 1", "x = logits * 2\nx.sum().tolist()", "if logits.any(): pass",
    "while not logits.any(): pass", "assert rows.column().all()", "y = 1 if logits.sum() > 0 else 2",
    "if array.any() and logits.any(): pass", "for x in logits: pass", "torch.where(logits > 0)", "torch.unique(logits)",
    "logits.masked_select(mask)", "torch.equal(logits, logits)", "logits.repeat_interleave(counts)",
    "logits[device_rows, tokens] = -torch.inf", "logits[slot] = 0.5", "torch.cuda.synchronize()",
    "(chosen,) = self.send([array])\nchosen.tolist()", "x, *y = send([array])\ny.tolist()",
    "if (x := logits.sum()) > 0: pass"])
def test_a_wait_is_found(line):
    body = "".join(f"    {part}\n" for part in line.split("\n"))
    tree = ast.parse(f"def apply(self, logits: torch.Tensor, rows, array: np.ndarray):\n{body}")
    assert waits(tree, Types.of([KNOWN, tree])), line


@pytest.mark.parametrize("line", [
    "array.tolist()", "rows.slots.tolist()", "rows.slots[rows.slots > 1]", "array.nonzero()", "np.nonzero(array)",
    "array[array > 0] = 1", "if array.any(): pass", "if logits is None: pass", "if logits.dim() > 1: pass",
    "int(logits.shape[0])", "len(logits)", "logits.to(torch.float32)", "logits.to(hidden.dtype)",
    "torch.tensor([1], device='cpu')", "torch.zeros(3, device=logits.device)", "torch.full((2,), 1, device=device)",
    "logits[rows.device_slots] = logits", "logits[:2] = 0", "logits[device_rows]", "self.send([array])",
    "torch.from_numpy(array).pin_memory().to(device, non_blocking=True)", "torch.where(logits > 0, logits, 0)",
    "logits.repeat_interleave(counts, output_size=4)", "logits.index_put_((x, y), logits.new_full((), -torch.inf))",
    "logits.masked_fill_(logits > 0, 0)", "x = logits.size(0)\nif x: pass"])
def test_what_waits_for_nothing_is_not_found(line):
    body = "".join(f"    {part}\n" for part in line.split("\n"))
    tree = ast.parse(f"def apply(self, logits: torch.Tensor, rows, array: np.ndarray):\n{body}")
    assert waits(tree, Types.of([KNOWN, tree])) == []


def test_constructors_kernels_and_code_outside_of_functions_may_wait():
    tree = ast.parse("torch.zeros(3).tolist()\nclass A:\n def __init__(self):\n  torch.zeros(3).tolist()\n"
                     "@triton.jit\ndef kernel():\n torch.zeros(3).tolist()\n"
                     "def made():\n def inner():\n  torch.zeros(3).tolist()\n return inner")
    assert [(function, line) for function, line, _ in waits(tree, Types.of([tree]))] == [("made.inner", 10)]
