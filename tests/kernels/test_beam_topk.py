import pytest
import torch

from batch_manager.triton_kernels.cpu.beam_topk import beam_topk as beam_topk_on_a_cpu


@pytest.fixture
def groups(integers):
    """groups([number of rows of each group], rates=None) -> group_starts, diversity_rate, max_rows"""

    def make(sizes, rates=None):
        starts = [sum(sizes[:group]) for group in range(len(sizes) + 1)]
        return integers(starts), integers(rates or [0.0] * len(sizes), torch.float32), max(sizes)

    return make


@pytest.fixture(params=["kernel", "twin of the CPU"])
def run_kernel(request, run_kernel):
    """Each test runs with the Triton kernel and with the CPU form."""
    if request.param == "kernel":
        return run_kernel

    def run(_, logits, *others, **named):
        def on_a_cpu(value):
            return value.cpu() if isinstance(value, torch.Tensor) else value

        found = beam_topk_on_a_cpu(on_a_cpu(logits), *map(on_a_cpu, others),
                                   **{name: on_a_cpu(value) for name, value in named.items()})
        return [tensor.to(logits.device) for tensor in found]

    return run


@pytest.fixture
def assert_same_candidates(run_kernel, run_oracle):
    """Assert that the kernel's candidates are those of the oracle in float64. Return the kernel's result.

    Parents and tokens must be equal, log-probs within the float32 error of a sum over the vocabulary. The inputs of the
    tests have no two different scores that are closer than this error.
    """

    def check(logits, temperature, cum_log_probs, starts, rates, max_rows, num_candidates):
        got = run_kernel("beam_topk", logits, temperature, cum_log_probs, rates, starts, num_candidates, max_rows)
        expected = run_oracle("beam_topk", logits.double(), temperature, cum_log_probs.double(), rates.double(), starts,
                              num_candidates, max_rows)
        assert torch.equal(got[3], expected[3])
        assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2])
        assert torch.equal(got[0].isinf(), expected[0].isinf())
        found = expected[0].isfinite()
        heat = temperature.where(temperature > 0, 1).min()
        largest = (logits.float().nan_to_num(0, 0, 0).abs().max() / heat).nan_to_num()
        allowed = torch.finfo(torch.float32).eps * (logits.shape[1] + 4 * largest + 8)
        assert ((got[0] - expected[0]).abs()[found] <= allowed).all()
        return got

    return check


def by_hand(logits, temperature, cum_log_probs, sizes, rates, num_candidates):
    """Return the best candidates of each group, by definition: [(log_prob, row within the group, token)].

    sizes   number of rows of each group
    """
    result, row = [], 0
    for size, rate in zip(sizes, rates):
        candidates = []
        for beam in range(size):
            heat = temperature[row] or 1.0
            log_p = (logits[row].double() / heat).log_softmax(0).tolist()
            order = sorted(range(len(log_p)), key=lambda token: (-log_p[token], token))
            candidates += [(cum_log_probs[row] + log_p[token] - rate * rank, beam, token, log_p[token])
                           for rank, token in enumerate(order)]
            row += 1
        candidates.sort(key=lambda candidate: -candidate[0])
        result.append([(log_prob, beam, token) for _, beam, token, log_prob in candidates[:num_candidates]])
    return result


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_oracle_is_the_definition(run_oracle, random, groups, rate):
    sizes = [3, 1, 4]
    logits, cum_log_probs = 2 * random(8, 30).cpu(), random(8).cpu()
    temperature = [1.0, 0.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.5]
    starts, rates, max_rows = groups(sizes, [rate] * 3)
    log_probs, parents, tokens, finite = run_oracle(
        "beam_topk", logits, torch.tensor(temperature), cum_log_probs, rates.cpu(), starts.cpu(), 8, max_rows)
    for group, expected in enumerate(by_hand(logits, temperature, cum_log_probs.tolist(), sizes, [rate] * 3, 8)):
        assert [(parents[group, i].item(), tokens[group, i].item()) for i in range(8)] == [c[1:] for c in expected]
        torch.testing.assert_close(log_probs[group].double(), torch.tensor([c[0] for c in expected]).double(),
                                   rtol=0, atol=1e-5)
    assert finite.all()


@pytest.mark.parametrize(("sizes", "num_candidates", "vocabulary"), [
    ([2, 2], 4, 4096), ([1, 3, 1], 6, 9000), ([4], 8, 5), ([4], 8, 64), ([1, 1], 16, 5000), ([2, 1], 90, 9000),
    ([3], 150, 50), ([1], 60, 40)])
def test_groups_equal_the_oracle(assert_same_candidates, random, integers, groups, dtype, sizes, num_candidates,
                                 vocabulary):
    rows = sum(sizes)
    assert_same_candidates((3 * random(rows, vocabulary)).to(dtype), integers([1.0] * rows, torch.float32),
                           2 * random(rows), *groups(sizes), num_candidates)


def test_temperatures_and_siblings_that_keep_away_from_each_other(assert_same_candidates, random, integers, groups):
    logits, temperature = 3 * random(9, 700), integers([0.0, 0.5, 2.0] * 3, torch.float32)
    near, far = (assert_same_candidates(logits, temperature, random(9), *groups([3, 3, 3], rates), 6)[1]
                 for rates in ([0.0] * 3, [50.0] * 3))
    assert [sorted(set(parents)) for parents in far[:, :3].tolist()] == [[0, 1, 2]] * 3
    assert near.tolist() != far.tolist()


def test_the_lower_row_and_the_lower_id_come_first_among_equals(run_kernel, run_oracle, random, integers, groups):
    logits = random(1, 6000).clamp(max=0).repeat(3, 1)
    logits[:, [5100, 17, 4090]] = 4.0
    starts, rates, max_rows = groups([3])
    for run in (run_kernel, run_oracle):
        _, parents, tokens, _ = run("beam_topk", logits, integers([1.0] * 3, torch.float32),
                                    integers([0.0] * 3, torch.float32), rates, starts, 8, max_rows)
        assert parents.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
        assert tokens.tolist() == [[17, 4090, 5100, 17, 4090, 5100, 17, 4090]]


def test_the_first_candidates_do_not_depend_on_how_many_are_asked_for(run_kernel, run_oracle, random, integers, groups):
    logits = (2 * random(4, 500)).round()                  # full of equal values
    starts, rates, max_rows = groups([2, 2])
    for run in (run_kernel, run_oracle):
        few, many = (run("beam_topk", logits, integers([1.0] * 4, torch.float32), integers([0.0] * 4, torch.float32),
                         rates, starts, count, max_rows) for count in (4, 32))
        for one, other in zip(few[:3], many[:3]):
            assert torch.equal(one, other[:, :4])


def test_rows_without_a_past_and_forbidden_tokens_yield_nothing(assert_same_candidates, random, integers, groups):
    logits, cum_log_probs = random(6, 4500), random(6)
    cum_log_probs[[1, 2]] = -torch.inf                     # one row is left of the first group
    logits[3:, 3:] = -torch.inf                            # nine tokens of the second
    log_probs, parents, tokens, finite = assert_same_candidates(
        logits, integers([1.0] * 6, torch.float32), cum_log_probs, *groups([3, 3]), 12)
    assert finite.all() and parents[0].tolist() == [0] * 12
    assert log_probs.isfinite().sum(1).tolist() == [12, 9] and tokens[1].max() <= 2


@pytest.mark.parametrize("num_candidates", [4, 9])
def test_rows_that_are_log_probs_are_taken_as_they_are(run_kernel, run_oracle, random, integers, groups,
                                                       num_candidates):
    logits, cum_log_probs = 2 * random(5, 5000), random(5)
    temperature = integers([0.5, 2.0, 0.0, 3.0, 1.0], torch.float32)
    logits[4, 2:] = -torch.inf
    starts, rates, max_rows = groups([2, 3], [0.0, 0.3])
    given = integers([0, 1, 1, 0, 1], torch.bool)
    found = [run("beam_topk", logits.clone(), temperature, cum_log_probs, rates, starts, num_candidates, max_rows,
                 are_log_probs=given) for run in (run_kernel, run_oracle)]
    for one, other in zip(*(results[1:] for results in found)):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)
    log_probs, parents, tokens, _ = found[0]
    taken = 0
    for group, first in enumerate((0, 2)):
        for log_prob, parent, token in zip(log_probs[group], parents[group].tolist(), tokens[group].tolist()):
            if given[first + parent]:
                assert log_prob == logits[first + parent, token]
                taken += 1
    assert taken > 2


def test_rows_that_are_not_numbers_are_flagged(run_kernel, run_oracle, random, integers, groups):
    logits = random(8, 4200)
    logits[0, 4199] = torch.nan
    logits[2, 0] = torch.inf
    logits[4] = -torch.inf
    logits[6, 1:] = -torch.inf
    starts, rates, max_rows = groups([2, 2, 2, 2])
    for run in (run_kernel, run_oracle):
        log_probs, parents, _, finite = run(
            "beam_topk", logits, integers([1.0] * 8, torch.float32), integers([0.0] * 8, torch.float32), rates, starts,
            4, max_rows)
        assert finite.tolist() == [False, True, False, True, False, True, True, True]
        assert parents[:3].tolist() == [[1] * 4] * 3 and log_probs.isfinite().all()


def test_a_group_does_not_depend_on_its_neighbours(run_kernel, random, integers, groups):
    logits, cum_log_probs = random(5, 800)[:, :700], random(5)         # a padded vocabulary: any row stride
    temperature = integers([1.0] * 5, torch.float32)
    starts, rates, max_rows = groups([2, 3])
    both = run_kernel("beam_topk", logits, temperature, cum_log_probs, rates, starts, 6, max_rows)
    for group, rows in enumerate((slice(0, 2), slice(2, 5))):
        starts, rates, max_rows = groups([rows.stop - rows.start])
        alone = run_kernel("beam_topk", logits[rows], temperature[rows], cum_log_probs[rows], rates, starts, 6,
                           max_rows)
        for one, other in zip(alone[:3], both[:3]):
            assert torch.equal(one[0], other[group])


def test_no_groups_are_no_work(run_kernel, random, integers):
    log_probs, _, _, finite = run_kernel(
        "beam_topk", random(0, 9), random(0), random(0), random(0), integers([0]), 4, 1)
    assert log_probs.shape == (0, 4) and finite.shape == (0,)
