"""Whatever a request carries, admission answers with Admitted or a RequestError, in bounded memory."""

import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from batch_manager.config import Limits
from batch_manager.errors import InvalidRequestError, RequestError
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy
from batch_manager.requests.admission import Admission, Admitted, usable_id
from batch_manager.requests.inference_request import TENSORS, InferenceRequest

ADMISSION = Admission(Limits(
    max_batch_size=8, max_num_tokens=64, max_seq_len=64, max_beam_width=4, max_num_requests=8, max_num_sequences=8,
    unbounded_sequences=False, vocab_size=100, num_blocks=16, tokens_per_block=8, enable_chunked_context=False,
    context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS, scheduler_policy=SchedulerPolicy.MAX_UTILIZATION))
EVERY_TENSOR = [name for name in TENSORS if name != "input_lengths"]
RAISED = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, RecursionError, StopIteration]


def explode(*args, **kwargs):
    raise SystemExit("hostile")


def fail(*args, **kwargs):
    # pytest also calls these members when it reports a failing test, so they must not raise SystemExit.
    raise RuntimeError("hostile")


def hostile_type(base, **members):
    return type("Hostile", (base,), members)


HOSTILE_MEMBERS = dict.fromkeys(
    ["__len__", "__array__", "__iter__", "__getitem__", "__int__", "__index__", "__float__", "__eq__", "__lt__",
     "__bool__", "__buffer__", "item", "tolist"], explode)
HOSTILE_MEMBERS |= dict.fromkeys(["__repr__", "__str__", "__format__"], fail)


class LyingList(list):
    def __len__(self):
        return 1


class LyingArray(np.ndarray):
    shape, ndim, size, nbytes = (1,), 1, 1, 4


class HostileType(type):
    def __hash__(cls):
        raise SystemExit("hostile")

    __name__ = property(fail)


class OfHostileType(metaclass=HostileType):
    pass


class LyingClass:
    __class__ = property(fail)


def hostile_values():
    yield from (hostile_type(base, **HOSTILE_MEMBERS)() for base in (object, list, tuple, dict, str, bytes, float))
    yield hostile_type(np.ndarray, **HOSTILE_MEMBERS)(3)
    yield hostile_type(np.float64, **HOSTILE_MEMBERS)(3)
    yield OfHostileType()
    yield LyingClass()
    yield LyingList([1] * 10_000)
    yield np.zeros(10**5, np.int32).view(LyingArray)
    yield np.ma.masked_array([1, 2], mask=[True, False])
    objects = np.empty(1, object)
    objects[0] = hostile_type(object, **HOSTILE_MEMBERS)()
    yield objects
    yield [hostile_type(object, **HOSTILE_MEMBERS)()]
    yield [[OfHostileType()]]
    yield [OfHostileType(), LyingClass()]
    endless = []
    endless.append(endless)
    yield endless
    yield lambda: None
    yield type


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_hostile_objects_end_in_a_refusal(name, refusal):
    for value in hostile_values():
        assert refusal(**{name: value}).startswith("[INVALID_REQUEST] request 7: ")


def test_an_integer_that_lies_about_itself_is_read_as_what_it_is(admit, refusal):
    lying = hostile_type(int, **(HOSTILE_MEMBERS | {"__ge__": lambda *args: True, "__hash__": int.__hash__}))
    assert admit(end_id=lying(5)).setup.end_id == 5
    assert "input_ids" in refusal(input_ids=[lying(5)])


@pytest.mark.parametrize("error", RAISED)
def test_a_request_whose_attributes_raise_is_refused(error, admission_with):
    def raise_it(self):
        raise error("hostile")

    for attribute in ("input_tensors", "is_streaming", "priority", "deadline_s", "cache_salt", "speculation",
                      "logits_post_processor", "request_id", "__class__"):
        item = object.__new__(hostile_type(InferenceRequest, **{attribute: property(raise_it)}))
        for name, value in (("_request_id", 7), ("_tensors", {"input_ids": [1], "request_output_len": 1})):
            object.__setattr__(item, name, value)
        with pytest.raises(InvalidRequestError) as caught:
            admission_with().admit(item)
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        assert usable_id(item) == (None if attribute == "request_id" else 7)


@pytest.mark.parametrize("request_id", [None, -1, 2**64, "7", True])
def test_a_request_whose_class_says_another_id_is_refused(request_id, admission_with):
    item = hostile_type(InferenceRequest, request_id=property(lambda self: request_id))(
        7, {"input_ids": [1], "request_output_len": 1})
    with pytest.raises(InvalidRequestError, match="do not override request_id"):
        admission_with().admit(item)


@pytest.mark.parametrize("name", ["input_ids", "temperature", "embedding_bias"])
def test_a_torch_tensor_that_becomes_something_else_is_refused(name, refusal):
    torch = pytest.importorskip("torch")
    lying = torch.zeros(2)
    lying.detach = lambda: SimpleNamespace(numpy=lambda: LyingList([1]))
    assert refusal(**{name: lying}).startswith("[INVALID_REQUEST] request 7: ")


def test_a_request_that_was_never_initialised_is_refused(admission_with):
    with pytest.raises(InvalidRequestError):
        admission_with().admit(InferenceRequest.__new__(InferenceRequest))


def test_names_that_were_smuggled_in_are_refused(admission_with):
    request = InferenceRequest(7, {"input_ids": [1], "request_output_len": 1})
    request._tensors["temprature"] = 1
    with pytest.raises(InvalidRequestError, match="temperature"):
        admission_with().admit(request)


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_huge_views_cost_no_memory(name, refusal):
    views = [np.broadcast_to(np.int8(0), shape) for shape in ((2**40,), (1, 2**40), (2**20, 2**20), (1, 2, 2**40))]
    views += [np.broadcast_to(np.float16(0), shape) for shape in ((2**40,), (2**20, 2**20))]
    shared = [0] * 1000
    views += [[shared] * 100_000, [[shared] * 100_000]]
    tracemalloc.start()
    for value in views:
        refusal(limits={"max_request_bytes": 10**6}, **{name: value})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 10**6


def test_lists_and_arrays_that_change_while_they_are_read_give_only_valid_tokens(admission_with):
    admission = admission_with()
    numbers, array = [1] * 20, np.ones(20, np.int64)
    stop = threading.Event()

    def scribble():
        while not stop.is_set():
            numbers[:] = [-1] * 100
            array[:] = -1
            numbers[:] = [1] * 20
            array[:] = 1

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(300):
            for prompt in (numbers, array):
                try:
                    admitted = admission.admit(InferenceRequest(7, {"input_ids": prompt, "request_output_len": 1}))
                except InvalidRequestError:
                    continue
                assert admitted.request.tokens == [[1] * 20]
    finally:
        stop.set()
        thread.join(60)


SCALARS = st.one_of(
    st.integers(), st.integers(-2, 101), st.floats(), st.booleans(), st.none(), st.text(max_size=3),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63), -0.0, 1e39, 1 + 0j, b"x", object()]))
ARRAYS = npst.arrays(
    dtype=st.one_of(npst.scalar_dtypes(), npst.array_dtypes(max_size=2), st.just(np.dtype(object))),
    shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
INTEGER_ARRAYS = npst.arrays(dtype=st.one_of(npst.integer_dtypes(), npst.floating_dtypes(), npst.boolean_dtypes()),
                             shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
LISTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=3).map(tuple),
                     max_leaves=10)
JUNK = st.one_of(SCALARS, LISTS, INTEGER_ARRAYS, ARRAYS)


@settings(max_examples=150, deadline=None)
@given(tensors=st.dictionaries(st.sampled_from(EVERY_TENSOR), JUNK, min_size=1, max_size=4),
       streaming=st.one_of(st.booleans(), SCALARS), priority=st.one_of(st.floats(0, 1), SCALARS), deadline=SCALARS)
def test_any_junk_is_admitted_or_refused_and_nothing_else(tensors, streaming, priority, deadline):
    request = InferenceRequest(7, {"input_ids": [1, 2], "request_output_len": 3} | tensors, is_streaming=streaming,
                               priority=priority, deadline_s=deadline)
    check_outcome(request)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(EVERY_TENSOR))
def test_junk_in_any_one_tensor_is_admitted_or_refused_and_nothing_else(data, name):
    check_outcome(InferenceRequest(7, {"input_ids": [1, 2], "request_output_len": 3} | {name: data.draw(JUNK)}))


@settings(max_examples=50, deadline=None)
@given(item=JUNK)
def test_any_item_is_refused_and_nothing_else(item):
    with pytest.raises(InvalidRequestError):
        ADMISSION.admit(item)


def check_outcome(request):
    try:
        admitted = ADMISSION.admit(request)
    except RequestError as error:
        assert error.response_text().isprintable() and error.fact and error.expectation
        return
    assert isinstance(admitted, Admitted)
    (tokens,) = admitted.request.tokens
    assert tokens and all(type(token) is int and 0 <= token < 100 for token in tokens)
    assert 1 <= admitted.request.max_new_tokens <= 64 - len(tokens)
    sampling = admitted.setup.sampling
    assert type(sampling.temperature) is float and 0 <= sampling.temperature < float("inf")
    assert type(sampling.top_k) is int and 0 <= sampling.top_k <= 100
    assert type(sampling.top_p) is float and 0 <= sampling.top_p <= 1
    assert -1 <= admitted.setup.end_id < 100 and 0 <= sampling.random_seed < 2**64
    assert type(admitted.response.is_streaming) is bool and 0 <= admitted.request.priority <= 1

