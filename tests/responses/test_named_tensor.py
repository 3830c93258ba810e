import copy
import pickle
import threading

import numpy as np
import pytest

from batch_manager.responses.named_tensor import (
    NamedTensor,
    OneTokenTensor,
    UniformArray,
    prepared,
    prepared_token,
)


def test_the_tensor_of_a_named_tensor_is_made_once_when_it_is_first_read():
    made = []
    tensor = NamedTensor("output_ids", np.zeros(3), lambda array: made.append(array) or array.tolist())
    assert made == []
    assert tensor.tensor is tensor.tensor and tensor.tensor == [0, 0, 0] and len(made) == 1
    with pytest.raises(AttributeError):
        tensor.tensor = 5
    array = np.zeros(1)
    assert NamedTensor("x", array).tensor is array


def read_beside(function, named, attribute):
    """Return (wrapper of `function`, list for the value that is read).

    In the first call of the wrapper, another thread reads `attribute` of `named` before `function` is called. The value
    is put at index 1 of the list.
    """
    others = []

    def called(*given):
        if not others:
            others.append(None)
            thread = threading.Thread(target=lambda: others.append(getattr(named, attribute)))
            thread.start()
            thread.join(30)
        return function(*given)

    return called, others


def test_threads_that_read_for_the_first_time_at_once_get_one_array_and_one_tensor(monkeypatch):
    named = NamedTensor("x", UniformArray((1, 2), np.dtype(np.int32), 3), np.ndarray.view)
    make, others = read_beside(UniformArray.make, named, "array")
    monkeypatch.setattr(UniformArray, "make", make)
    assert named.array is others[1] and named.array.tolist() == [[3, 3]]

    named = prepared_token("x", np.ndarray.view)()
    named.token = 5
    array, others = read_beside(OneTokenTensor.array.fget, named, "array")
    monkeypatch.setattr(OneTokenTensor, "array", property(lambda self: array(self)))
    assert named.array is others[1] and named.array.tolist() == [[[5]]]

    named = NamedTensor("x", np.zeros(3), lambda array: to_tensor(array))
    to_tensor, others = read_beside(np.ndarray.view, named, "tensor")
    assert named.tensor is others[1] and named.tensor is not named.array
    named.tensor[:] = 5
    assert named.array.tolist() == [5, 5, 5]


@pytest.mark.parametrize("given", [np.zeros((2, 3)), UniformArray((2, 3), np.dtype(np.float32)), [[1, 2, 3], [4, 5, 6]]
                                   ])
def test_what_is_printed_of_a_named_tensor_makes_nothing(given, monkeypatch):
    def fail(*_):
        raise AssertionError("made")

    monkeypatch.setattr(UniformArray, "make", fail)
    assert repr(NamedTensor("x", given, fail)) == "NamedTensor('x', shape=(2, 3))"


def test_the_array_of_what_a_user_named_is_an_array():
    torch = pytest.importorskip("torch")
    for given in (torch.arange(3), [0, 1, 2], (0, 1, 2), np.arange(3)):
        named = NamedTensor("x", given)
        assert type(named.array) is np.ndarray and named.array.tolist() == [0, 1, 2]
        assert named.tensor is given and named.array is named.array
    tensor = torch.arange(3)
    NamedTensor("x", tensor).array[0] = 9
    assert tensor[0] == 9 and repr(NamedTensor("x", tensor)) == "NamedTensor('x', shape=(3,))"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda named: pickle.loads(pickle.dumps(named))])
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("make", [np.full, lambda shape, value: UniformArray(shape, np.dtype(np.int64), value)])
def test_array_and_tensor_of_a_copy_share_their_memory_too(copied, is_read, make):
    named = NamedTensor("x", make((1, 2), 3), np.ndarray.view)
    if is_read:
        assert named.tensor.tolist() == [[3, 3]]
    other = copied(named)
    assert (type(other), other.name, other.array.tolist()) == (NamedTensor, "x", [[3, 3]])
    other.tensor[0, 0] = 7
    assert other.array.tolist() == [[7, 3]]
    if copied is not copy.copy:
        assert named.array.tolist() == [[3, 3]]


def test_a_prepared_tensor_is_what_a_named_tensor_of_the_same_value_is():
    calls = []
    to_tensor = lambda array: calls.append(array) or array.view()    # noqa: E731
    value = UniformArray((1, 2), np.dtype(np.float32), 0.5)
    cum_log_probs, output_ids = prepared("cum_log_probs", value, to_tensor), prepared_token("output_ids", to_tensor)
    token = output_ids()
    token.token = 7
    for made, expected in ((cum_log_probs(), NamedTensor("cum_log_probs", value, to_tensor)),
                           (token, NamedTensor("output_ids", np.array([[[7]]], np.int32), to_tensor))):
        assert isinstance(made, NamedTensor) and repr(made) == repr(expected) and not calls
        assert made.name == expected.name and made.array.dtype == expected.array.dtype
        assert made.array.tolist() == expected.array.tolist() and made.array is made.array
        assert made.tensor is made.tensor and made.tensor.base is made.array and calls == [made.array]
        calls.clear()
    first, second = cum_log_probs(), cum_log_probs()
    first.array.fill(9)
    assert second.array.tolist() == [[0.5, 0.5]] and cum_log_probs().array.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda named: pickle.loads(pickle.dumps(named))])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_copy_of_a_prepared_tensor_is_a_named_tensor(copied, is_read):
    token = prepared_token("output_ids", np.ndarray.view)()
    token.token = 7
    for made in (token, prepared("x", UniformArray((1, 1, 1), np.dtype(np.int32), 7), np.ndarray.view)()):
        if is_read:
            made.array.fill(8)
        other = copied(made)
        assert (type(other), other.name, other.array.tolist()) == (NamedTensor, made.name, [[[8 if is_read else 7]]])
        other.tensor.fill(9)
        assert other.array.tolist() == [[[9]]]
        assert copied is copy.copy or made.array.tolist() == [[[8 if is_read else 7]]]
