"""Fixtures that run kernels and oracles side by side.

With a GPU, the kernels run on it, in this process. Without one, they run in triton's interpreter, in a worker process
that starts on first use. The worker is needed because TRITON_INTERPRET must be set before the first import of triton:
in this process, an earlier import (by transformers or torch's compiler) would break these tests, and the variable would
affect other tests (`dispatch.use_triton`). The tests that compile kernels need the opposite setting, and also run in
their own process.

With BATCH_MANAGER_ARGUMENT_SETS=FILE in the environment, no kernel runs. Every call of a kernel is written to the file
for compile_argument_sets.py, and the oracle computes the result. The tests run as on a machine with a GPU, which is
pretended; see pretended_gpu.py. Passing tests then prove only that all calls were recorded, and that no test mixes
tensors of two devices. Tests without a fixture that puts tensors on the device are left out. With
BATCH_MANAGER_EACH_VALUE_ONCE=1 too, only some tests run: with each value of each parameter at least once.

Of a test with the mark `pairs`, an interpreter runs each pair of values of its parameters, and not each combination. A
GPU runs them all, and so does BATCH_MANAGER_ALL_CASES=1. The campaign T18 records the calls of them all.
"""

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
RECORD_TO = os.environ.get("BATCH_MANAGER_ARGUMENT_SETS")      # a file; None: kernels run
DEVICE = "cuda" if torch.cuda.is_available() or RECORD_TO else "cpu"

ON_THE_DEVICE = {"run_kernel", "run_oracle", "random", "integers"}         # fixtures that put tensors on it
TWIN_ROUNDINGS = 2      # roundings to the storage dtype that a CPU form may have beyond the kernel's


def _load(path):
    """Load a helper module from this folder, which is not a package and not on sys.path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker_protocol = _load(HERE / "interpreter_worker.py")
argument_sets = _load(HERE / "argument_sets.py")
pretended_gpu = _load(HERE / "pretended_gpu.py")


def pytest_collection_modifyitems(items):
    each_value_once = os.environ.get("BATCH_MANAGER_EACH_VALUE_ONCE") == "1"
    runs_all = DEVICE == "cuda" or os.environ.get("BATCH_MANAGER_ALL_CASES") == "1"
    cases, left_out = defaultdict(list), set()
    if RECORD_TO:
        items[:] = [item for item in items if ON_THE_DEVICE & set(item.fixturenames)]
    for item in items:
        if HERE in item.path.parents and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        if each_value_once:
            left_out |= set(found) - set(covering(found, 1))
        elif not runs_all and found[0].get_closest_marker("pairs"):
            here = [item for item in found if not item.get_closest_marker("gpu")]
            left_out |= set(here) - set(covering(here, 2))
    items[:] = [item for item in items if item not in left_out]


def covering(items, size):
    """Return cases of a test in which each combination of `size` values of its parameters occurs."""
    size = min(size, *(len(item.callspec.params) for item in items), size)
    combinations = {item: set(itertools.combinations(
        [(name, repr(value)) for name, value in sorted(item.callspec.params.items())], size)) for item in items}
    missing, chosen = set().union(*combinations.values()), []
    while missing:
        chosen.append(next(item for item in items if combinations[item] & missing) if size == 1 else
                      max(items, key=lambda item: len(combinations[item] & missing)))
        missing -= combinations[chosen[-1]]
    return chosen


@pytest.fixture(autouse=bool(RECORD_TO))
def pretend_to_have_a_gpu():
    with pretended_gpu.PretendedGpu():
        yield


class Interpreter:
    """Runs a Triton kernel in the worker process each time the object is called. The first call starts the process."""

    def __init__(self):
        self.process = None

    def __call__(self, module, function, args, kwargs, **options):
        if self.process is None:
            environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.quick_interpreter", "tests.kernels.interpreter_worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=HERE.parents[1],
            )
        request = (module, function, args, kwargs, options)
        worker_protocol.send(self.process.stdin, request)
        answer = worker_protocol.receive(self.process.stdout)
        assert isinstance(answer, tuple), answer or "the interpreter's process died"

        result, tensors = answer
        for mine, theirs in zip(worker_protocol.tensors_of(args, kwargs), tensors):
            mine.untyped_storage().copy_(theirs.untyped_storage())       # a view's neighbours too
        return result

    def stop(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def interpreter():
    interpreter = Interpreter()
    yield interpreter
    interpreter.stop()


@pytest.fixture(scope="session")
def run_kernel(interpreter):
    """run_kernel(name, *args, function=None, interpreted=None, **kwargs): runs the Triton kernel `name`.

    The kernel mutates the arguments.

    function      name of the wrapper in the kernel's module; None: `name`
    interpreted   options of interpreter_worker.py, without effect on a GPU; None: no options
    """

    def run(module, *args, function=None, interpreted=None, **kwargs):
        if RECORD_TO:
            with open(RECORD_TO, "a") as file:
                file.write(argument_sets.described(module, function or module, args, kwargs) + "\n")
            return _oracle_in_its_place(module, function or module, args, kwargs)
        if DEVICE == "cpu":
            return interpreter(module, function or module, args, kwargs, **(interpreted or {}))
        found = importlib.import_module(f"batch_manager.triton_kernels.{module}")
        return getattr(found, function or module)(*args, **kwargs)

    return run


@pytest.fixture(scope="session")
def calls_within(interpreter):
    """calls_within(name, *args, of=function, **kwargs): runs the Triton kernel `name` and notes calls of a function.

    `of` names a function in the kernel's module. Returns a list with an item for each of its calls in all programs of
    the kernel: the shapes of its arguments that are tensors of several elements. The test is skipped if kernels do not
    run in the interpreter."""

    def calls(module, *args, of, **kwargs):
        if DEVICE != "cpu":
            pytest.skip("calls are noted in the interpreter")
        return interpreter(module, module, args, kwargs, noted_calls_of=of)

    return calls


@pytest.fixture(scope="session")
def is_recording():
    """Whether calls of kernels are recorded, and oracles compute the results in float64."""
    return RECORD_TO is not None


def _oracle_in_its_place(module, function, args, kwargs):
    """Run the oracle on float64 copies, and write its results to the arguments as a kernel would."""
    found = getattr(importlib.import_module(f"batch_manager.triton_kernels.reference.{module}"), function)
    given = [*args, *kwargs.values()]
    wide = _copies(given, torch.float64)
    result = found(*wide[: len(args)], **dict(zip(kwargs, wide[len(args) :])))
    back = {}
    for mine, theirs in zip(given, wide):
        if isinstance(mine, torch.Tensor):
            mine.copy_(theirs)
            back[id(theirs)] = mine
    dtype = given[0].dtype
    if isinstance(result, tuple) or not dtype.is_floating_point:
        dtype = torch.float32

    def narrowed(value):
        if not isinstance(value, torch.Tensor) or id(value) in back:
            return back.get(id(value), value)
        return value.to(dtype) if value.is_floating_point() else value

    return tuple(map(narrowed, result)) if isinstance(result, tuple) else narrowed(result)


@pytest.fixture(scope="session")
def run_oracle():
    """run_oracle(name, *args, function=None, **kwargs): runs the oracle of the kernel. It mutates the arguments."""

    def run(module, *args, function=None, **kwargs):
        found = importlib.import_module(f"batch_manager.triton_kernels.reference.{module}")
        return getattr(found, function or module)(*args, **kwargs)

    return run


@pytest.fixture(scope="session")
def run_twin(run_oracle):
    """run_twin(name, *args, **kwargs): runs the CPU form of `name` on the arguments, not on copies; on a GPU, the
    oracle.
    """

    def run(module, *args, **kwargs):
        return _twin_of(module)(*args, **kwargs) if DEVICE == "cpu" else run_oracle(module, *args, **kwargs)

    return run


def _copies(values, dtype=None):
    """Return the values with tensors copied: floating-point tensors in `dtype`, or in their own dtype if it is None.

    A tensor that occurs twice, as input and output, is copied once.
    """
    copies = {}
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            copies[id(value)] = value.to(dtype if dtype and value.is_floating_point() else value.dtype, copy=True)
    return [copies.get(id(value), value) for value in values]


def _twin_of(module):
    """Return the CPU form of an operation, or None."""
    name = f"batch_manager.triton_kernels.cpu.{module}"
    return getattr(importlib.import_module(name), module) if importlib.util.find_spec(name) else None


@pytest.fixture(scope="session")
def assert_equals_oracle(run_kernel, run_oracle):
    """assert_equals_oracle(name, *args, roundings, reduction, dtype, interpreted, **kwargs) -> the kernel's result

    The oracle runs on float64 copies. The result and every tensor argument after the call must agree with the oracle.
    On a CPU, the operation's CPU form, if there is one, must agree too. It may round more often.

    The largest allowed error is (roundings * eps(dtype) + reduction * eps(float32)) * largest expected value:
    `roundings` is the number of roundings to the storage dtype that lead to a result, including its own (1), and
    `reduction` is the number of terms that are summed in float32. NaN must be exactly where the oracle has NaN. Tests
    fill outputs with NaN before the call, so that the comparison proves which entries are written.
    """

    def check(module, *args, roundings=1, reduction, dtype, interpreted=None, **kwargs):
        wide = _copies([*args, *kwargs.values()], torch.float64)
        wide_args, wide_kwargs = wide[: len(args)], dict(zip(kwargs, wide[len(args) :]))
        twin = _twin_of(module) if DEVICE == "cpu" else None
        if twin is not None:
            copies = _copies([*args, *kwargs.values()])
            twin_args, twin_kwargs = copies[: len(args)], dict(zip(kwargs, copies[len(args) :]))
        expected = run_oracle(module, *wide_args, **wide_kwargs)
        got = run_kernel(module, *args, interpreted=interpreted, **kwargs)
        compare(got, args, kwargs, expected, wide_args, wide_kwargs, dtype, roundings, reduction)
        if twin is not None:
            compare(twin(*twin_args, **twin_kwargs), twin_args, twin_kwargs, expected, wide_args, wide_kwargs, dtype,
                    roundings + TWIN_ROUNDINGS, reduction)
        return got

    def compare(got, args, kwargs, expected, wide_args, wide_kwargs, dtype, roundings, reduction):
        eps = 0.0 if not dtype.is_floating_point else torch.finfo(dtype).eps
        share = roundings * eps + reduction * torch.finfo(torch.float32).eps
        for mine, theirs in zip(
            [got, *worker_protocol.tensors_of(args, kwargs)],
            [expected, *worker_protocol.tensors_of(wide_args, wide_kwargs)],
        ):
            if not mine.is_floating_point():
                assert torch.equal(mine, theirs)
                continue
            assert mine.dtype in (dtype, torch.float32) and mine.shape == theirs.shape
            size = float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=share * size, equal_nan=True)

    return check


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.float16, id="float16"),
        # Interpreted bf16 dots are silently wrong, so values are compared on a GPU only.
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
    ]
)
def dtype(request):
    if request.param == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("bfloat16 is compared by value on a GPU only")
    return request.param


@pytest.fixture
def random():
    """random(*shape, dtype=float32) -> normal numbers, the same in every run"""
    generator = torch.Generator().manual_seed(20240607)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    return draw


@pytest.fixture
def integers():
    """integers(list, dtype=int32) -> a tensor of these values on the kernels' device"""

    def make(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return make


class PagedCache:
    """A KV cache with the keys and values of sequences, random numbers, in the second of two layers.

    A page is a block. Unused pages hold NaN.

    pool           [N, 2, HK, B, D]: the second layer, a strided view of the whole pool
    block_table    [sequences, max_blocks] int32, pages in random order; unused entries name a page of NaN
    contents       keys and values [2, HK, length, D] of each sequence, in order of tokens
    """

    def __init__(self, random, kv_lengths, num_kv_heads, head_size, tokens_per_block, dtype):
        generator = torch.Generator().manual_seed(7)
        num_pages = [-(-length // tokens_per_block) for length in kv_lengths]
        num_blocks = sum(num_pages) + 2
        whole = torch.full((num_blocks, 2, 2, num_kv_heads, tokens_per_block, head_size), torch.nan)
        whole = whole.to(dtype).to(DEVICE)
        self.pool = whole[:, 1]
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()        # page 0 stays NaN
        self.block_table = torch.zeros(len(kv_lengths), max(num_pages) + 2, dtype=torch.int32)
        self.contents = []
        for sequence, (length, pages) in enumerate(zip(kv_lengths, num_pages)):
            rows = torch.zeros(2, num_kv_heads, pages * tokens_per_block, head_size, dtype=dtype, device=DEVICE)
            rows[:, :, :length] = random(2, num_kv_heads, length, head_size, dtype=dtype)
            for page in range(pages):
                block = free.pop()
                self.block_table[sequence, page] = block
                self.pool[block] = rows[:, :, page * tokens_per_block : (page + 1) * tokens_per_block]
            self.contents.append(rows[:, :, :length])
        self.block_table = self.block_table.to(DEVICE)
        self.kv_lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=DEVICE)

    def take_newest(self):
        """Remove the newest token of each sequence: the page of the token gets NaN from the token's position on.

        Returns the keys and the values of the removed tokens, [sequences, HK, D] each; NaN for a sequence of length 0.
        """
        tokens_per_block = self.pool.shape[3]
        taken = torch.full((2, len(self.contents), *self.pool.shape[2:5:2]), torch.nan, dtype=self.pool.dtype,
                           device=DEVICE)
        for sequence, rows in enumerate(self.contents):
            if (length := rows.shape[2]) > 0:
                taken[:, sequence] = rows[:, :, -1]
                page, place = divmod(length - 1, tokens_per_block)
                self.pool[self.block_table[sequence, page], :, :, place:] = torch.nan
        return taken.unbind()

    def give_back(self, sequence, first_position, window, sink):
        """Remove the pages of a sequence that no query at `first_position` or after it sees. Return their number.

        A removed page holds NaN. Its block-table entry then names page 0, which holds NaN, or a page far before the
        pool.
        """
        tokens_per_block = self.pool.shape[3]
        left = range(-(-sink // tokens_per_block), max(first_position - window + 1, 0) // tokens_per_block)
        for page in left:
            self.pool[self.block_table[sequence, page]] = torch.nan
            self.block_table[sequence, page] = 0 if page % 2 else -(2**30)       # that many blocks before the pool
        return len(left)


@pytest.fixture
def streaming_attention():
    """streaming_attention(query [T, HQ, D], contents [2, HK, length, D], scale, window, sink, softcap=None, ...)

    It returns the attention of the last T tokens of a sequence, computed for one token and head at a time. A token sees
    its window and the first `sink` tokens, as in StreamingLLM.

    added         (head, key position, query position) -> number that is added to the score
    sink_logits   [HQ]: for each head, the score of an additional key with a value of zeros
    """

    def attend(query, contents, scale, window, sink, softcap=None, added=None, sink_logits=None):
        length, group = contents.shape[2], query.shape[1] // contents.shape[1]
        out = torch.empty_like(query)
        for row, position in enumerate(range(length - len(query), length)):
            seen = [key for key in range(position + 1) if key > position - window or key < sink]
            for head in range(query.shape[1]):
                keys, values = contents[:, head // group, seen]
                scores = scale * (keys @ query[row, head])
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                if added is not None:
                    scores = scores + scores.new_tensor([added(head, key, position) for key in seen])
                weights = scores.exp()
                total = weights.sum() + (0 if sink_logits is None else sink_logits[head].exp())
                out[row, head] = weights @ values / total
        return out

    return attend


@pytest.fixture
def paged_cache(random):
    """paged_cache(kv_lengths, num_kv_heads, head_size, tokens_per_block, dtype) -> PagedCache"""
    return lambda *args: PagedCache(random, *args)
