"""T20, C13: each feature with each other: every request gets what it gets alone, or the pair is refused by name.

A cell runs worlds until both features took effect in one request, at most MOST_WORLDS. A bug that is planted in a
feature makes at least one of its cells wrong.
"""

from collections import Counter

import pytest

from tests.harness.compiled import library_or_skip

from .engines import Engines, judge
from .features import FEATURES
from .pairs import MARKS, ORDER, REASONS, all_pairs, mixtures, page
from .world import MODELS, SCRIPTED, World

MOST_WORLDS = 5
# (features, model, whether it is compared bit by bit, with `deterministic` on a model)
MIXTURES = [("CRPWBAK", SCRIPTED, True), ("CPWNBA", SCRIPTED, True), ("WNBV", SCRIPTED, True),
            ("CRPBK", "qwen2_moe", True), ("CRPWGA", "llama", False), ("PWNGAF", "gemma3", True),
            ("WNGV", "gemma3", False), ("CRPBT", "mixtral", False), ("CRPLY", "olmoe", True), ("PWGAT", "llama", False),
            ("CRPWLS", SCRIPTED, True), ("CRPLS", "granite_moe", True), ("PNLS", "gemma3", False),
            ("CRPLSQ", "qwen3_moe", False), ("CRPTS", "llama", False)]
# What worlds draw, besides features. Each must occur in many cells.
DRAWN = ("overlap", "deterministic", "compiled steps", "two calls a step", "host blocks",
         "more active requests than a step has", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "is_streaming", "priority",
         "cache_salt", "return_context_logits",
         "return_generation_logits", "return_top_log_probs", "raw_log_probs", "return_perf_metrics", "end_id",
         "input_token_extra_ids", "prompt_embedding_table", "temperature", "repetition_penalty", "stop_words_list",
         "no_repeat_ngram_size", "bad_words_list", "min_length", "presence_penalty", "embedding_bias",
         "frequency_penalty", "runtime_top_p", "runtime_top_p_decay", "runtime_min_p", "runtime_top_k")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("checkpoints"))


def can_run(letters: str, model: str) -> bool:
    features = [FEATURES[letter] for letter in letters]
    if model == SCRIPTED:
        return not any(feature.needs_model for feature in features)
    return all(model in (feature.models or MODELS) and not set(feature.scripted_with) & set(letters)
               for feature in features)


def skip_without_extras(letters: str, model: str) -> None:
    for name in (*(["torch"] if model != SCRIPTED else []), *(["llguidance", "tokenizers"] if "G" in letters else [])):
        pytest.importorskip(name)
    if "Q" in letters:
        library_or_skip()


def run_cell(engines: Engines, letters: str, model: str) -> tuple[str, int]:
    """Return (what is wrong, number of requests for which all features took effect)."""
    skip_without_extras(letters, model)
    met = 0
    for seed in range(MOST_WORLDS):
        verdict = judge(engines, letters, seed, model)
        met += verdict.met
        if verdict.wrong or met:
            return verdict.wrong, met
    return "", 0


# These do not depend on a model's attention. MIXTURES run them with Gemma 3 too, and the campaign each of their pairs.
NOT_IN_PAIRS = {"gemma3": "GLA"}
CELLS = [(pair, model) for model in (SCRIPTED, *MODELS) for pair in all_pairs()
         if can_run(pair, model) and not set(pair) & set(NOT_IN_PAIRS.get(model, ""))]


@pytest.mark.parametrize("pair, model", CELLS)
def test_a_pair_is_equal_to_alone_or_refused(engines, pair, model):
    wrong, met = run_cell(engines, pair, model)
    assert not wrong, wrong
    assert met, f"the two features of {pair} never took effect in one request"


@pytest.mark.parametrize("letters, model, exact", MIXTURES)
def test_a_mixture_is_equal_to_alone(engines, letters, model, exact):
    assert letters in mixtures(len(letters))
    skip_without_extras(letters, model)
    verdict = judge(engines, letters, 0, model, exact=exact)
    assert not verdict.wrong, verdict.wrong


@pytest.mark.parametrize("letter", ORDER)
def test_a_bug_of_a_feature_makes_a_cell_wrong(engines, letter, monkeypatch):
    FEATURES[letter].plant(monkeypatch)
    model = "llama" if FEATURES[letter].needs_model else SCRIPTED
    cells = [pair for pair in all_pairs() if letter in pair and can_run(pair, model) and MARKS[pair] != "r"]
    for pair in cells:
        try:
            if run_cell(engines, pair, model)[0]:
                return
        except Exception:                              # the engine failed, or its pool was found damaged
            return
    pytest.fail(f"no cell of {cells} is wrong")


# The table itself.

def test_every_pair_has_a_mark_and_every_mark_a_pair():
    assert "".join(FEATURES) == ORDER
    assert list(MARKS) == all_pairs() and set(MARKS.values()) <= {"=", "-", "r"}
    assert all(MARKS[2 * letter] == "=" for letter in ORDER)


def test_every_other_mark_has_its_reason():
    assert {pair for pair, mark in MARKS.items() if mark != "="} <= REASONS.keys() <= MARKS.keys()
    for pair, reason in REASONS.items():
        mark = MARKS[pair]
        assert (reason.off != "") == (mark == "-") and reason.off in pair
        assert (reason.says != "") == (mark == "r" or mark == "-" and not (reason.missing or reason.of_request))


def test_worlds_draw_every_option_often():
    drawn = Counter(name for pair, model in CELLS if MARKS[pair] != "r" for name in World(pair, 0, model).drawn)
    assert {name: drawn[name] for name in DRAWN if drawn[name] < 4} == {}


def test_every_feature_describes_itself_for_the_page():
    text = page()
    assert all(f"[{feature.name}]({feature.page})" in text for feature in FEATURES.values())
