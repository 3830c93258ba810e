"""SamplingConfig checks the range of each parameter, and gives the device the right values."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from batch_manager.errors import InvalidRequestError
from batch_manager.requests.inference_request import TENSORS
from batch_manager.sampling_config import NEUTRAL, PARAMETERS, SamplingConfig

NAN, INF = float("nan"), float("inf")


def test_every_field_has_a_tensor_and_a_range_and_every_such_tensor_is_documented():
    assert list(PARAMETERS) == [field.name for field in fields(SamplingConfig)]
    assert all(TENSORS[row.tensor].parameter == name and TENSORS[row.tensor].default == getattr(NEUTRAL, name)
               for name, row in PARAMETERS.items())


@pytest.mark.parametrize("knob, allowed", [
    ("beam_width", [1, 2**31 - 1]), ("temperature", [0, 0.0, -0.0, 1, 1e30]), ("top_k", [0, 1, 1024]),
    ("top_p", [0, 0.5, 1, 1.0]), ("top_p_decay", [1e-9, 1]), ("top_p_min", [1e-9, 1]),
    ("top_p_reset_ids", [-1, 0, 5]), ("min_p", [0, 1]), ("len_penalty", [0, 2.5]), ("early_stopping", [-1, 0, 1, 2]),
    ("beam_search_diversity_rate", [0, 9.0]), ("repetition_penalty", [1e-9, 1, 2.0]),
    ("presence_penalty", [-2, 0, 2.0]), ("frequency_penalty", [-2, 0, 2.0]), ("no_repeat_ngram_size", [0, 3]),
    ("min_length", [0, 3]), ("random_seed", [0, 2**63, 2**64 - 1])])
def test_values_at_the_ends_of_each_range_are_allowed(knob, allowed):
    for value in allowed:
        assert getattr(SamplingConfig(**{knob: value}), knob) == value


@pytest.mark.parametrize("knob, wrong", [
    ("beam_width", [0, -1, 2**31]), ("temperature", [-1e-9, 1e39]), ("top_k", [-1, 1025]),
    ("top_p", [-0.1, 1.1]), ("top_p_decay", [0, 1.1]), ("top_p_min", [0, 1.1]), ("top_p_reset_ids", [-2]),
    ("min_p", [-0.1, 1.1]), ("len_penalty", [-1]), ("early_stopping", [2**31, -(2**31) - 1]),
    ("beam_search_diversity_rate", [-1]), ("repetition_penalty", [0, -1]), ("presence_penalty", [1e39, 10**400]),
    ("frequency_penalty", [-1e39]), ("no_repeat_ngram_size", [-1]), ("min_length", [-1, 2**31]),
    ("random_seed", [-1, 2**64])])
def test_values_outside_are_refused_by_the_name_of_the_tensor(knob, wrong):
    for value in [*wrong, NAN, INF, -INF, True, "1", None, [1], 10**5000]:
        with pytest.raises(InvalidRequestError, match=PARAMETERS[knob].tensor) as caught:
            SamplingConfig(**{knob: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("knob", [name for name, row in PARAMETERS.items() if row.range.whole])
def test_a_float_is_no_integer(knob):
    with pytest.raises(InvalidRequestError):
        SamplingConfig(**{knob: 1.0})


def test_the_text_has_fact_and_expectation():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingConfig(top_p=1.5)
    assert str(caught.value) == ("runtime_top_p is 1.5; it must be a number in [0, 1]")


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        NEUTRAL.top_k = 3


def test_integers_become_the_floats_they_are_and_no_zero_is_negative():
    config = SamplingConfig(temperature=2, presence_penalty=-0.0, top_p=1)
    assert [type(value) for value in (config.temperature, config.top_p, config.top_k)] == [float, float, int]
    assert str(config.presence_penalty) == "0.0" and config.temperature == 2.0


def test_each_parameter_has_another_value_that_is_allowed():
    config = SamplingConfig(**{name: row.other for name, row in PARAMETERS.items()})
    assert all(config.sets([name]) and not NEUTRAL.sets([name]) for name in PARAMETERS)


def test_the_device_holds_what_a_number_means():
    assert PARAMETERS["random_seed"].stored(2**64 - 1) == -1 and PARAMETERS["random_seed"].stored(3) == 3
    for name in ("repetition_penalty", "temperature", "top_p", "min_p"):
        assert np.float32(PARAMETERS[name].stored(1e-60)) > 0 and PARAMETERS[name].stored(0.25) == 0.25
    assert PARAMETERS["top_p"].stored(0.0) == 0 and PARAMETERS["presence_penalty"].stored(-1e-60) == -1e-60
    assert [PARAMETERS[name].dtype for name in ("random_seed", "top_k", "top_p")] == [np.int64, np.int32, np.float32]


@pytest.mark.parametrize("values, is_greedy", [
    ({}, True), ({"top_k": 1, "top_p": 0.5}, True), ({"temperature": 0, "top_k": 5}, True), ({"top_k": 2}, False),
    ({"top_p": 1}, False), ({"temperature": 0.5}, True)])
def test_which_configurations_take_the_likeliest_token(values, is_greedy):
    assert SamplingConfig(**values).is_greedy == is_greedy
