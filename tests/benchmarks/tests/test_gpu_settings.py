"""The GPU report chooses the fastest launch settings, and its code for them does what it says when it is pasted."""

import ast
import inspect
import sys
import textwrap

import pytest

pytest.importorskip("triton")

from batch_manager.triton_kernels.context_work_list import context_tile_rows
from batch_manager.triton_kernels.decode_work_list import MIN_PAGES_PER_PART, ROUNDS, decode_work_list, times_in_pages
from batch_manager.triton_kernels.device_limits import DeviceLimits
from batch_manager.triton_kernels.fused_linear_settings import FusedLinearSettings, settings_of_few_rows
from batch_manager.triton_kernels.paged_attention_context import ContextSettings, context_settings
from batch_manager.triton_kernels.paged_attention_decode import DecodeSettings, decode_settings
from tests.benchmarks.gpu_report.device_clock import Timing
from tests.benchmarks.gpu_report.settings_candidates import (
    context_candidates,
    decode_candidates,
    fused_candidates,
)
from tests.benchmarks.gpu_report.settings_code import (
    Best,
    Parts,
    Trial,
    best_of,
    code_of,
    text_of,
    tile_rows_code,
)

H100 = DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132, operands_in_shared=True)
ONE, TWO, THREE = (DecodeSettings(264, 4, stages) for stages in (4, 3, 2))


def trial(settings, seconds, case="a", **options):
    timing = None if seconds is None else Timing((seconds,) * 4)
    return Trial("decode_settings", (128, 64, 2), case, settings, settings == ONE, timing, **options)


def pasted(function, code):
    """Return the function with the code below its docstring, in a copy of its module."""
    function = inspect.unwrap(function)
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("def "))
    below = ast.parse("\n".join(lines)).body[0].body[0].end_lineno
    source = "\n".join([*lines[first:below], code, *lines[below:]])
    names = dict(vars(sys.modules[function.__module__]))
    exec(source, names)
    return names[function.__name__]


def test_the_best_settings_are_fastest_over_all_cases_in_which_they_were_timed():
    trials = [trial(ONE, 4.0), trial(TWO, 2.0), trial(THREE, 1.0), trial(ONE, 4.0, "b"), trial(TWO, 4.0, "b"),
              trial(THREE, None, "b")]
    best = best_of(trials)
    assert best.settings == TWO and best.gain == pytest.approx(2**0.5)
    assert best_of([trial(ONE, None), trial(TWO, 2.0)]) is None
    assert best_of([trial(ONE, 1.0), trial(TWO, 2.0)]).settings == ONE


@pytest.mark.parametrize("function, key, settings, others", [
    (decode_settings, (128, 64, 2), DecodeSettings(132, 8, 5), [(64, 64, 2), (128, 32, 2)]),
    (settings_of_few_rows, (576, 960, False, 2), FusedLinearSettings(16, 32, 128, 8, 3), [(576, 960, True, 2)])])
def test_pasted_code_changes_the_settings_of_its_key_alone(function, key, settings, others):
    changed = pasted(function, code_of(Best(function.__name__, key, settings, 1.1), 132))
    assert changed(*key, H100) == settings != function(*key, H100)
    for other in others:
        assert changed(*other, H100) == function(*other, H100)
    for multiprocessors in (78, 132):
        limits = H100._replace(multiprocessors=multiprocessors)
        assert function is not decode_settings or changed(*key, limits).resident_programs == multiprocessors


def test_pasted_code_of_context_attention_agrees_on_the_rows_of_a_tile():
    best = Best("context_settings", (128, 2, 64, None), ContextSettings(64, 64, 4, 3), 1.2)
    changed = pasted(context_settings, code_of(best, 132))
    assert changed(128, 2, 64, H100) == best.settings != context_settings(128, 2, 64, H100)
    assert changed(128, 2, 64, H100, 16) == context_settings(128, 2, 64, H100, 16)
    rows = pasted(context_tile_rows, tile_rows_code(best))
    assert (rows(128, 2), rows(64, 2)) == (64, context_tile_rows(64, 2))


def test_the_constants_of_work_lists_are_written_as_code():
    code = code_of(Best("decode_work_list", (), Parts(8, 2), 1.05), 132)
    names = {}
    exec(code, names)
    assert (names["MIN_PAGES_PER_PART"], names["ROUNDS"]) == (8, 2) and "1.05 times as fast" in code


def test_parts_are_those_of_the_work_list():
    import numpy as np

    lengths = np.array([5000, 64, 3000])
    pages = Parts(MIN_PAGES_PER_PART, ROUNDS).pages_per_part(lengths, 16, 8, 132)
    assert (decode_work_list(lengths, 16, 8, 132)[0] == decode_work_list(
        lengths, 16, 8, 132, pages_per_part=pages)[0]).all()


def test_the_time_of_a_merge_is_what_is_missing_to_the_time_of_parts():
    """32 sequences of 1,024 tokens: 256 programs of 16 pages each run at once on 264 places."""
    import numpy as np

    whole, in_parts = times_in_pages(np.full(32, 16), 4, 8, 264)
    assert (whole, in_parts) == (16, pytest.approx(32 * 16 * 8 / 264 + 4))


def test_the_table_has_predictions_and_why_settings_were_not_timed():
    text = text_of([trial(ONE, 2e-4, predicted="255 us", rate="4,000 GB/s"), trial(TWO, 1e-4),
                    trial(THREE, None, problem="OutOfResources: shared memory")], "some GPU", 132)
    assert "measured on some GPU" in text
    rows = [line for line in text.splitlines() if line.startswith("| a ")]
    assert rows[0].endswith("| 200.0 | 1.000 | 4,000 GB/s | 255 us | present |")
    assert "| 100.0 | 2.000 | - | - |" in rows[1]
    assert rows[2].endswith("| - | - | - | - | OutOfResources: shared memory |")
    assert "num_stages=3" in text.partition("| case |")[0]


def test_candidates_begin_with_the_present_settings_and_fit_the_device():
    for head_size in (64, 128):
        present = decode_settings(head_size, 64, 2, H100)
        found = decode_candidates(present, head_size, 64, 2, H100)
        assert found[0] == present and len(found) == len(set(found)) >= 8
        assert {one.num_stages for one in found} >= {3, 4, 5} and {one.num_warps for one in found} == {4, 8}
        present = context_settings(head_size, 2, 64, H100)
        found = context_candidates(present, 64)
        assert found[0] == present and len(found) >= 8 and all(one.rows >= 64 for one in found)
    for key in ((576, 960, False, 2), (4096, 14336, True, 2), (14336, 4096, False, 2)):
        present = settings_of_few_rows(*key, H100)
        found = fused_candidates(present, *key, H100)
        assert found[0] == present and len(found) >= 5
        for one in found:
            rows = one.columns * (2 if key[2] else 1) + 16
            assert one.num_stages == 1 or one.num_stages * rows * one.step * 2 <= H100.shared_bytes


def test_settings_that_fail_or_give_wrong_results_are_not_timed(tmp_path):
    import torch

    from tests.benchmarks.gpu_report.bench import Bench
    from tests.benchmarks.gpu_report.device_clock import DryClock
    from tests.benchmarks.gpu_report.settings import _timed

    bench = Bench(DryClock(torch.device("cpu")), torch.float32, tmp_path)

    def fails():
        raise RuntimeError("out of resource: shared memory\nmore")

    assert _timed(bench, fails, lambda launch: 0.0) == (None, "RuntimeError: out of resource: shared memory")
    assert _timed(bench, lambda: abs, lambda launch: 0.5) == (None, "the result is wrong: relative error 0.5")
    timing, problem = _timed(bench, lambda: abs, lambda launch: 0.0)
    assert timing.median == 1.0 and not problem
