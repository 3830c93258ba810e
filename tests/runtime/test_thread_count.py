import sys
import threading

import pytest
import torch

from batch_manager.errors import ConfigError
from batch_manager.runtime import thread_count
from batch_manager.runtime.thread_count import compute_threads, require_openmp

CPU = torch.device("cpu")


def on_a_new_thread(action):
    found = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.fixture(params=[1, 4], ids=lambda count: f"the host has {count}")
def before(request):
    """Set the host's thread count in torch and yield it. After the test, assert that it is unchanged.

    New threads must have the same count too.
    """
    kept = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == on_a_new_thread(torch.get_num_threads) == request.param
    torch.set_num_threads(kept)


def test_the_thread_count_is_put_back_even_after_a_raise(before):
    with pytest.raises(ValueError), compute_threads(CPU, before + 1):
        assert torch.get_num_threads() == before + 1
        raise ValueError
    assert torch.get_num_threads() == before
    with compute_threads(CPU, None), compute_threads(torch.device("cuda"), before + 1):
        assert torch.get_num_threads() == before


def test_c18_a_thread_of_the_hosts_that_begins_meanwhile_has_the_hosts_number(before):
    has_mkl = torch.backends.mkl.is_available()
    with compute_threads(CPU, before + 1):
        assert on_a_new_thread(torch.get_num_threads) == before
        assert f"at::get_num_threads() : {before + 1}" in torch.__config__.parallel_info()
        assert f"omp_get_max_threads() : {before + 1}" in torch.__config__.parallel_info()
        assert f"mkl_get_max_threads() : {before + 1}" in torch.__config__.parallel_info() or not has_mkl
    assert f"mkl_get_max_threads() : {before}" in torch.__config__.parallel_info() or not has_mkl


def test_c18_engines_on_two_threads_do_not_take_each_others_number_for_the_hosts(before):
    first_is_in, second_is_out, numbers = threading.Event(), threading.Event(), []

    def first():
        with compute_threads(CPU, before + 1):
            first_is_in.set()
            second_is_out.wait(20)
            numbers.append(torch.get_num_threads())
        numbers.append(torch.get_num_threads())

    def second():
        first_is_in.wait(20)
        with compute_threads(CPU, before + 2):
            numbers.append(torch.get_num_threads())
        numbers.append(torch.get_num_threads())
        second_is_out.set()

    threads = [threading.Thread(target=action) for action in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert numbers == [before + 2, before, before + 1, before]


def test_c18_no_thread_of_the_hosts_ever_sees_another_number(before):
    """While steps run with another thread count, threads that the host starts always see the host's count (C18).

    torch.set_num_threads would change the count of the whole process.
    """
    done, seen = threading.Event(), set()

    def host():
        while not done.is_set():
            seen.add(on_a_new_thread(torch.get_num_threads))

    def steps():
        for number in range(2_000):
            with compute_threads(CPU, before + 1 + number % 2):
                pass
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=action) for action in (host, steps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert seen == {before}


def test_a_thread_of_the_engines_keeps_its_number(before):
    def steps():
        for _ in range(3):
            with compute_threads(CPU, before + 1, lambda thread: thread is threading.current_thread()):
                yield torch.get_num_threads()
            yield torch.get_num_threads()

    assert on_a_new_thread(lambda: list(steps())) == [before + 1] * 6


def test_a_torch_whose_openmp_cannot_be_called_is_refused_by_name(before, monkeypatch):
    monkeypatch.setattr(thread_count.ctypes, "CDLL", lambda name: object())
    thread_count._libraries.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"num_threads was given.*has no OpenMP"):
            require_openmp()
        with compute_threads(CPU, None), compute_threads(CPU, before):
            pass
    finally:
        thread_count._libraries.cache_clear()


def test_what_the_host_sets_meanwhile_stays(before):
    def step():
        with compute_threads(CPU, before + 1, lambda thread: True):
            on_a_new_thread(lambda: torch.set_num_threads(before + 4))
            return torch.get_num_threads()

    assert on_a_new_thread(step) == before + 1
    assert on_a_new_thread(torch.get_num_threads) == before + 4
    torch.set_num_threads(before)
