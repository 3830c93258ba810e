from collections import Counter

import pytest
import torch


@pytest.fixture
def row_parameters(integers):
    """row_parameters(temperature, top_k, top_p, seed, position) -> the arguments of these names, from lists"""

    def make(temperature, top_k, top_p, seed=None, position=None):
        rows = len(temperature)
        return (
            integers(temperature, torch.float32), integers(top_k), integers(top_p, torch.float32),
            integers(seed or [1000 + row for row in range(rows)], torch.int64),
            integers(position or list(range(rows))),
        )

    return make


@pytest.fixture
def assert_same_draw(run_kernel, run_twin, run_oracle):
    """assert_same_draw(logits, parameters, **more): samples with kernel, CPU form and oracle. Returns the tokens.

    Tokens and `finite` flags must be equal. The kernel's log-probs must agree with the oracle within the float32 error
    of a sum over the vocabulary.
    """

    def check(logits, parameters, **more):
        tokens, log_probs, finite = run_kernel("sample_token", logits, *parameters, **more)
        expected_tokens, expected_log_probs, expected_finite = run_oracle("sample_token", logits, *parameters, **more)
        assert torch.equal(finite, expected_finite)
        assert torch.equal(tokens, expected_tokens)
        of_twin = run_twin("sample_token", logits, *parameters, **more)
        assert torch.equal(of_twin[0], tokens) and torch.equal(of_twin[2], finite)
        # Terms in the sum, and the argument of the exponential, whose error passes through the logarithm.
        temperature = parameters[0][more["slots"]] if "slots" in more else parameters[0]
        heat = temperature.where(temperature > 0, 1)
        largest = (logits.float().nan_to_num(0, 0, 0).abs().amax(1) / heat).nan_to_num()
        allowed = torch.finfo(torch.float32).eps * (logits.shape[1] + 4 * largest + 8)
        error = (log_probs - expected_log_probs).abs()[finite]
        assert (error <= allowed[finite]).all()
        assert log_probs[~finite].isnan().all()
        return tokens

    return check


@pytest.mark.parametrize("vocabulary", [7, 1024, 5000])
def test_mixed_rows_equal_the_oracle(assert_same_draw, random, row_parameters, dtype, vocabulary):
    top_k = [0, 1, 5, 0, 0, 10, 50, 100000]
    top_p = [0.0, 0.9, 0.0, 0.9, 1.0, 0.5, 0.95, 0.3]
    temperature = [1.0, 0.0, 0.7, 1.0, 1.5, 1.0, 0.3, 2.0]
    logits = (3 * random(8, vocabulary)).to(dtype)
    assert_same_draw(logits, row_parameters(temperature, top_k, top_p))


@pytest.mark.parametrize("dtype_of_logits", [torch.float32, torch.float16])
def test_a_vocabulary_of_several_pieces(assert_same_draw, random, row_parameters, dtype_of_logits):
    logits = random(6, 20_000).to(dtype_of_logits)         # nearly uniform: samples fall into all pieces
    parameters = row_parameters([1.0] * 6, [0, 3000, 0, 9000, 0, 0], [1.0, 0.0, 0.6, 0.7, 0.0, 0.99])
    tokens = assert_same_draw(logits, parameters)
    assert len((tokens // 4096).unique()) > 2


def test_rows_that_are_all_greedy_need_nothing_but_maxima(assert_same_draw, random, row_parameters):
    logits = random(5, 5000)
    logits[2, 4999] = logits[2, 17] = 8.0
    parameters = row_parameters([0.0, 1.0, 1.0, 0.0, 0.0], [0, 1, 0, 50, 0], [0.0, 0.9, 0.0, 0.9, 0.5])
    tokens = assert_same_draw(logits, parameters, only_greedy=True)
    assert tokens.tolist() == logits.argmax(1).tolist() and tokens[2] == 17


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (20, 0.0), (0, 0.8), (20, 0.8)])
def test_many_positions_of_one_request(assert_same_draw, random, row_parameters, top_k, top_p):
    rows = 12
    logits = (2 * random(1, 300)).expand(rows, 300).contiguous()
    parameters = row_parameters([1.0] * rows, [top_k] * rows, [top_p] * rows, [77] * rows, list(range(rows)))
    assert len(assert_same_draw(logits, parameters).unique()) > 3


@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_min_p_beside_everything_else(assert_same_draw, random, row_parameters, integers, vocabulary):
    top_k, top_p = [0, 0, 5, 0, 40, 0, 0], [1.0, 0.9, 0.0, 0.0, 0.95, 1.0, 1.0]
    temperature = [1.0, 1.5, 0.7, 1.0, 2.0, 0.5, 3.0]
    min_p = integers([0.1, 0.05, 0.3, 0.9, 0.01, 1.0, 1e-30], torch.float32)
    logits = 3 * random(7, vocabulary)
    for position in range(4):
        parameters = row_parameters(temperature, top_k, top_p, position=[position] * 7)
        tokens = assert_same_draw(logits, parameters, min_p=min_p)
        assert tokens[5] == logits[5].argmax()
        log_ratio = (logits.gather(1, tokens[:, None].long())[:, 0] - logits.amax(1)) / parameters[0]
        assert (log_ratio >= min_p.log() - 1e-5).all()


def test_greedy_takes_the_lowest_id_among_equals(assert_same_draw, random, row_parameters):
    logits = random(3, 5000).clamp(max=2)
    logits[:, [4200, 130, 4300]] = 9.0
    tokens = assert_same_draw(logits, row_parameters([0.0, 1.0, 0.5], [50, 0, 1], [0.9, 0.0, 0.0]))
    assert tokens.tolist() == [130, 130, 130]


def test_ties_of_the_last_kept_logit_are_kept(run_kernel, random, row_parameters):
    rows = 12
    logits = random(1, 64).clamp(max=0).repeat(rows, 1)
    logits[:, [3, 20, 50]] = 5.0                           # top_k = 2 and top_p = 0.4 both end inside this tie
    for top_k, top_p in ((2, 0.0), (0, 0.4)):
        parameters = row_parameters([1.0] * rows, [top_k] * rows, [top_p] * rows)
        tokens, _, _ = run_kernel("sample_token", logits, *parameters)
        assert set(tokens.tolist()) == {3, 20, 50}


def test_forbidden_tokens_are_never_drawn(assert_same_draw, random, row_parameters):
    logits = random(4, 2000)
    logits[:, 5:] = -torch.inf
    logits[3, :] = -torch.inf
    logits[3, 1234] = -3.0
    tokens = assert_same_draw(logits, row_parameters([1.0] * 4, [0, 50, 0, 50], [1.0, 0.0, 0.9, 0.9]))
    assert (tokens[:3] < 5).all() and tokens[3] == 1234


def test_a_top_k_above_the_number_of_allowed_tokens_keeps_them_all(assert_same_draw, random, row_parameters):
    rows = 12
    logits = random(1, 300).repeat(rows, 1)
    logits[:, 5:] = -torch.inf
    tokens = assert_same_draw(logits, row_parameters([2.0] * rows, [50] * rows, [0.0] * rows))
    assert len(tokens.unique()) > 2


def test_extreme_logits_and_temperatures(assert_same_draw, random, row_parameters):
    logits = random(5, 100)
    logits[0, 7] = 3e38
    logits[1] = torch.finfo(torch.float32).min
    logits[2, 50:] = torch.finfo(torch.float32).min
    assert_same_draw(logits[:3], row_parameters([1.0, 1.0, 1.0], [0, 0, 60], [1.0, 1.0, 0.999]))
    # A temperature near 0 is nearly greedy; a huge one samples evenly.
    tokens = assert_same_draw(logits[3:], row_parameters([1e-3, 1e6], [0, 0], [1.0, 1.0]))
    assert tokens[0] == logits[3].argmax()


def test_rows_that_are_not_numbers_are_flagged(run_kernel, run_twin, run_oracle, random, row_parameters):
    logits = random(6, 3000)
    logits[0, 2999] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = -torch.inf
    logits[4, 0] = torch.nan
    parameters = row_parameters([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0, 5, 0, 5, 0, 0], [1.0, 0.0, 0.9, 0.0, 0.0, 0.0])
    for run in (run_kernel, run_twin, run_oracle):
        tokens, log_probs, finite = run("sample_token", logits, *parameters)
        assert finite.tolist() == [False, False, False, True, False, True]
        assert tokens[~finite].tolist() == [0] * 4 and log_probs[~finite].isnan().all()


def test_results_go_where_the_caller_wants_them(run_kernel, random, row_parameters, integers):
    logits = random(2, 200)[:, :150]                       # a padded vocabulary: rows of 200, of which 150 count
    tokens, log_probs, finite = integers([-1, -1], torch.int64), random(2), integers([0, 0])
    run_kernel(
        "sample_token", logits, *row_parameters([1.0, 0.0], [0, 0], [1.0, 0.0]),
        tokens=tokens, log_probs=log_probs, finite=finite,
    )
    assert finite.tolist() == [1, 1] and tokens[1] == logits[1].argmax() and (log_probs <= 0).all()


def test_a_row_does_not_depend_on_its_neighbours(run_kernel, random, row_parameters):
    logits = random(4, 1500)
    parameters = row_parameters([1.0] * 4, [0, 40, 0, 40], [1.0, 0.0, 0.9, 0.9])
    tokens, log_probs, _ = run_kernel("sample_token", logits, *parameters)
    for row in range(4):
        one = slice(row, row + 1)
        token, log_prob, _ = run_kernel("sample_token", logits[one], *(values[one] for values in parameters))
        assert torch.equal(token, tokens[one]) and torch.equal(log_prob, log_probs[one])


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (6, 0.0), (0, 0.7), (8, 0.8)])
def test_the_oracle_draws_from_the_distribution_it_documents(run_oracle, top_k, top_p):
    # Goodness of fit of 20,000 samples, at the positions of one request.
    draws, vocabulary, temperature = 20_000, 20, 0.8
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)).double()
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[order[: top_k or vocabulary]] = True
    if 0 < top_p < 1:
        inside = probabilities * kept / probabilities[kept].sum()
        before = inside[order].cumsum(0) - inside[order]
        kept[order[before >= top_p]] = False
    expected = probabilities * kept / probabilities[kept].sum()

    tokens, _, _ = run_oracle(
        "sample_token", logits.float().expand(draws, vocabulary), torch.full((draws,), temperature),
        torch.full((draws,), top_k, dtype=torch.int32), torch.full((draws,), top_p),
        torch.full((draws,), 987654321), torch.arange(draws, dtype=torch.int32),
    )
    counts = torch.bincount(tokens.long(), minlength=vocabulary).double()
    assert (counts[~kept] == 0).all()
    chi_square = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_numbers_of_slots_are_those_of_rows(assert_same_draw, run_kernel, random, row_parameters, integers, dtype):
    temperature, top_k, top_p = [1.0, 0.0, 0.7, 1.0, 1.5, 1.0], [0, 1, 5, 0, 0, 40], [1.0, 0.9, 0.0, 0.9, 0.3, 0.95]
    by_slot, slots = row_parameters(temperature, top_k, top_p), [4, 0, 2, 5]
    logits, min_p = (3 * random(4, 700)).to(dtype), integers([0.1, 0.0, 0.0, 0.01, 0.2, 0.0], torch.float32)
    position = integers([7, 8, 9, 10])
    found = assert_same_draw(logits, (*by_slot[:4], position), min_p=min_p, slots=integers(slots, torch.int64))
    by_row = [values[slots] for values in by_slot[:4]]
    tokens, _, _ = run_kernel("sample_token", logits, *by_row, position, min_p=min_p[slots])
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("side", ["run_kernel", "run_twin", "run_oracle"])
def test_what_follows_from_a_token_is_written_too(request, side, random, row_parameters, integers):
    run = request.getfixturevalue(side)
    logits, slots, position = random(3, 300), [5, 0, 3], [6, 4, 103]
    logits[2, 9] = torch.nan                               # no token can be sampled from this row: it gets token 0
    best = logits.argmax(1).tolist()
    parameters = row_parameters([0.0] * 6, [0] * 6, [0.0] * 6)
    end_id = integers([best[1], 7, 7, 7, 7, best[0] + 1])
    finish, last_tokens = integers([-1] * 3), integers([[-1] * 4] * 6, torch.int64)
    run("sample_token", logits, *parameters[:4], integers(position), slots=integers(slots, torch.int64), end_id=end_id,
        finish=finish, last_tokens=last_tokens)
    assert finish.tolist() == [0, 1, 0]
    expected = torch.full((6, 4), -1)
    expected[5, 2], expected[0, 0], expected[3, 3] = best[0], best[1], 0
    assert torch.equal(last_tokens.cpu(), expected)


def test_counts_that_are_given_are_used(assert_same_draw, run_kernel, random, row_parameters, integers, is_recording):
    logits, parameters = random(3, 5000), row_parameters([1.0] * 3, [50, 0, 9], [0.9, 0.9, 0.0])
    counts = integers([[0] * 2048] * 3)
    tokens, _, _ = run_kernel("sample_token", logits, *parameters, counts=counts)
    assert torch.equal(tokens, assert_same_draw(logits, parameters))
    if not is_recording:
        assert counts.sum(1).tolist() == [5000, 0, 5000]       # entries that top-k reads


def test_top_p_of_what_top_k_keeps_ends_in_any_digit(assert_same_draw, random, row_parameters, dtype):
    # Both thresholds are within one first digit, in two, and in ties of one logit.
    top_k, top_p = [300, 401, 3, 250, 700] * 2, [0.5, 0.95, 0.4, 0.999, 0.05] * 2
    logits = torch.cat([1 + random(10, 400).abs() / 64, random(10, 400) - 3], 1).to(dtype)
    logits[5:, :200] = logits[5:, :1]
    assert_same_draw(logits, row_parameters([0.9] * 10, top_k, top_p))


@pytest.mark.parametrize("counts, shares, kept", [
    ([300, 300, 8400], [0.510, 0.290, 0.200], 1), ([300, 300, 8400], [0.490, 0.310, 0.200], 2),
    ([300, 4000, 4700], [0.498, 0.264, 0.238], 2), ([300, 300, 8400], [0.490, 0.005, 0.505], 3)])
def test_the_weight_of_logits_that_top_p_cannot_keep_counts(run_kernel, row_parameters, dtype, counts, shares, kept):
    """The kernel weighs such logits together, such as 8,400 of one kind with 0.2 of the weight. Top-p is 0.5.

    kept   number of kinds, from the first, that top-p keeps; rounded to bfloat16, the shares are others
    """
    rows = 12
    logits = torch.cat([torch.full((count,), share / count).log() for share, count in zip(shares, counts)]).to(dtype)
    kinds, order = torch.arange(3).repeat_interleave(torch.tensor(counts)), torch.randperm(9000)
    parameters = row_parameters([1.0] * rows, [0] * rows, [0.5] * rows)
    tokens, _, _ = run_kernel("sample_token", logits[order].repeat(rows, 1).to(parameters[0].device), *parameters)
    weights = logits.double().exp()
    likelier = [weights[weights > weights[kinds == kind][0]].sum() / weights.sum() for kind in range(3)]
    last = max(kind for kind in range(3) if likelier[kind] < 0.5)
    assert kinds[order][tokens.long().cpu()].max() == last and (last == kept - 1 or dtype == torch.bfloat16)


@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (0, 0.05), (0, 0.9999), (40, 0.9)])
def test_a_program_adds_to_no_address_often(interpreter, random, row_parameters, is_recording, top_k, top_p):
    """Additions to one address wait for each other. Without sums of a program, there are up to 1,000 to an address."""
    if is_recording or torch.cuda.is_available():
        pytest.skip("atomic operations are noted in the interpreter")
    arguments = ((3 * random(1, 16_000)).half(), *row_parameters([1.0], [top_k], [top_p]))
    noted = interpreter("sample_token", "sample_token", arguments, {}, noted_atomics=True)
    times = Counter((program, address) for program, addresses, bits in noted if bits == 64 for address in addresses)
    assert times and max(times.values()) <= 64
