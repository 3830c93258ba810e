"""TextStream returns pieces of text that add up to the text of all tokens decoded at once, however it gets the tokens.

tests/extras/text_streams.py generates random texts and the expected results. This file runs 60 texts of each tokenizer.
The campaign runs ten thousand:

    python tests/campaigns/text_streams.py --first-seed 0 --texts 10000
"""

import logging
import random
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from batch_manager import BatchManagerError, ConfigError, InvalidRequestError

tokenizers = pytest.importorskip("tokenizers")

from batch_manager.extras.stop_strings import StopStrings  # noqa: E402
from batch_manager.extras.text import TextStream  # noqa: E402
from batch_manager.extras.token_text import CLEAN_UP, _CleanUp, _ReplaceInText  # noqa: E402
from tests.extras import text_streams  # noqa: E402
from tests.extras.text_streams import FAMILY, text_behind, tokenizer_named, up_to_stop, with_special  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
SEEDS = 60


@pytest.fixture(scope="module")
def austen():
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def pieces(stream, tokens):
    return [stream.push([token]) for token in tokens] + [stream.finish()]


@pytest.mark.parametrize("name", text_streams.TOKENIZERS)
def test_joined_pieces_are_the_text_of_decoding_everything(name):
    seen = Counter()
    for seed in range(SEEDS):
        text_streams.run(seed, name, seen)
    assert seen["stopped"] >= SEEDS // 10 and seen["prompts"] >= SEEDS // 3
    assert seen["pushes that owed nothing"] >= SEEDS or name in ("odd", *text_streams.DECODED_AT_THE_END)


# ---------------------------------------------------------------------- single cases


def test_what_is_certain_is_sent_at_once(austen):
    stream = TextStream(austen, ids(austen, "It was"))
    text = " a fine evening; and nobody could say " + FAMILY
    sent = ""
    tokens = ids(austen, text)
    for n, token in enumerate(tokens, 1):
        sent += stream.push([token])
        assert sent == text_behind(austen, [], tokens[:n], True).rstrip("\N{REPLACEMENT CHARACTER}")
    assert sent == text and stream.finish() == ""


def test_half_a_character_waits_and_comes_out_at_the_end_as_decode_has_it(austen):
    tokens = ids(austen, "\N{GRINNING FACE}")
    assert len(tokens) > 1
    stream = TextStream(austen)
    assert [stream.push([token]) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.finish() == austen.decode(tokens[:-1]) == "\N{REPLACEMENT CHARACTER}"
    whole = TextStream(austen)
    assert pieces(whole, tokens) == [""] * (len(tokens) - 1) + ["\N{GRINNING FACE}", ""]


def test_bytes_that_never_become_a_character_are_not_kept_back(austen):
    wrong = austen.token_to_id("ÿ")
    assert pieces(TextStream(austen), [wrong] * 50) == ["\N{REPLACEMENT CHARACTER}"] * 50 + [""]


def test_a_prompt_that_ends_within_a_character_leaves_it_to_the_text(austen):
    first, *others = ids(austen, "\N{GRINNING FACE}")
    assert "".join(pieces(TextStream(austen, [first]), others)) == "\N{GRINNING FACE}"
    assert "".join(pieces(TextStream(austen, [first]), ids(austen, "a"))) == "a", "U+FFFD is of the prompt"
    assert pieces(TextStream(austen, [first]), []) == [""]


def test_the_space_before_the_first_word_depends_on_the_prompt():
    llama = tokenizer_named("llama")
    word = llama.token_to_id("▁do")
    assert pieces(TextStream(llama), [word, word]) == ["do", " do", ""]
    assert pieces(TextStream(llama, [word]), [word, word]) == [" do", " do", ""]
    assert pieces(TextStream(llama, [llama.token_to_id("<s>")]), [word, word]) == ["do", " do", ""]


def test_a_run_of_byte_tokens_is_text_as_a_whole_or_not_at_all():
    llama = tokenizer_named("llama")
    run = [llama.token_to_id(f"<0x{byte:02X}>") for byte in "文".encode()]
    wrong, word = llama.token_to_id("<0xFF>"), llama.token_to_id("▁do")
    assert pieces(TextStream(llama), [*run, word]) == ["", "", "", "文 do", ""]
    assert pieces(TextStream(llama), [*run, wrong, word]) == [""] * 4 + ["\N{REPLACEMENT CHARACTER}" * 4 + " do", ""]
    assert pieces(TextStream(llama, run), [wrong]) == ["", "\N{REPLACEMENT CHARACTER}" * 4]


def test_special_tokens_are_left_out_unless_they_are_asked_for(austen):
    end = austen.token_to_id("</s>")
    tokens = [*ids(austen, "so"), end, *ids(austen, " much"), end]
    assert "".join(pieces(TextStream(austen), tokens)) == "so much"
    assert "".join(pieces(TextStream(austen, skip_special_tokens=False), tokens)) == "so</s> much</s>"
    stream = TextStream(austen, stop="</s>", skip_special_tokens=False)
    assert "".join(pieces(stream, tokens)) == "so" and stream.stopped_by == "</s>"


# ---------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("stop, sent, stopped_by", [
    (["lazy", "fox"], "the quick brown ", "fox"),
    (["brown fox", "fox"], "the quick brown ", "fox"),          # both complete with the same character: the shorter one
    (["quick brown fox j", "brown f"], "the quick ", "brown f"),     # complete first, although it begins later
    (["the"], "", "the"),
    (["jumps"], "the quick brown fox jump", None),
    ("fox", "the quick brown ", "fox"),
    ([], "the quick brown fox jump", None),
    (["]", "^", "-k", "o"], "the quick br", "o"),
])
def test_the_text_ends_before_the_stop_string_that_is_complete_first(austen, stop, sent, stopped_by):
    tokens = ids(austen, "the quick brown fox jump")
    for size in (1, 2, 3, 99):
        stream = TextStream(austen, stop=stop)
        got = "".join(stream.push(tokens[n: n + size]) for n in range(0, len(tokens), size)) + stream.finish()
        assert (got, stream.stopped_by) == (sent, stopped_by)
        assert stream.finish() == ""
        if stopped_by:
            assert stream.push(tokens) == "", "nothing comes behind a stop string, and nobody minds"


def test_text_that_may_begin_a_stop_string_waits_and_no_other_does(austen):
    stream = TextStream(austen, stop=["\n\nUser:", "</answer>"])
    sent = [stream.push(ids(austen, text)) for text in ("one", "\n", "\n", "two <", "/ans", "wer. ", "</answer")]
    assert sent == ["one", "", "", "\n\ntwo ", "", "</answer. ", ""]
    assert stream.finish() == "</answer" and stream.stopped_by is None


def test_the_search_finds_what_looking_everywhere_finds():
    draw, found = random.Random(3), 0
    for _ in range(3000):
        strings = ["".join(draw.choices("ab", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 5))]
        text, held, position = "".join(draw.choices("abc", k=12)), "", 0
        stop, (expected, stopped_by) = StopStrings(strings), up_to_stop(text, strings)
        while position < len(text):
            size = draw.randrange(1, 4)
            seen, held = len(held), held + text[position: position + size]
            if (complete := stop.first(held, seen)) is not None:
                break
            position += size
            begun, held = text[:position], held[stop.begun(held):]
            assert len(held) == max(n for n in range(7) if n == 0 or any(
                begun.endswith(other[:n]) for other in strings if n < len(other)))
        assert (None if complete is None else complete[1]) == stopped_by
        if complete is not None:
            found += 1
            assert text[: position - seen + complete[0]] == expected
    assert 1000 < found < 2999


@pytest.mark.parametrize("letters, tail", [("a", "b"), ("ab", "c"), ("a", "")])
def test_the_longest_stop_strings_cost_little_memory_and_a_bounded_number_of_comparisons(letters, tail):
    """Texts that keep 64 strings of 4,096 characters nearly complete, and then do not complete them."""
    class Counted(str):
        compared = 0

        def startswith(self, *arguments):
            Counted.compared += 1
            return str.startswith(self, *arguments)

    strings = [Counted((letters * 4096)[: 4096 - len(tail) - number] + tail + "x" * number) for number in range(64)]
    tracemalloc.start()
    stop = StopStrings(strings)
    assert tracemalloc.get_traced_memory()[0] < 20_000      # the strings themselves are the caller's
    tracemalloc.stop()
    text, held = (letters * 5000)[:4000] + "z" + (letters * 5000)[:4000] + "yz", ""
    for character in text:
        seen, held = len(held), held + character
        assert stop.first(held, seen) is None
        held = held[stop.begun(held):]
    assert held == "" and Counted.compared <= 2 * len(text)


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
@pytest.mark.parametrize("before, stop", [
    ("</s>", ["</s>"]), ("the cat</s>", ["nothing", "cat</s>"]), ("the<|tool|>cat", ["<|tool|>c"]),
    ("a cat<|tool|></s>", ["<|tool|></s>"]), ("the<think>", ["<think>"]), ("the<think></s>", ["k></s>"]),
])
def test_a_stop_string_with_special_tokens_ends_the_text_where_transformers_ends_it(transformers, name, before, stop):
    torch = pytest.importorskip("torch")
    tokenizer = tokenizer_named(name)
    if name != "byte level":        # a word after a token begins with a space
        stop = [string.replace("<|tool|>c", "<|tool|> c") for string in stop]
    tokens = [*ids(tokenizer, "we"), *ids(tokenizer, before), *ids(tokenizer, "cat</s> x")]
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ends = transformers.StopStringCriteria(wrapped, stop)
    length = next(n for n in range(1, len(tokens) + 1) if ends(torch.tensor([tokens[:n]]), None)[0])
    for given in (tokenizer, wrapped):
        stream, number = TextStream(given, stop=stop), 0
        text = ""
        while stream.stopped_by is None:
            text += stream.push(tokens[number: number + 1])
            number += 1
        assert (number, stream.stopped_by) == (length, stop[-1])
        together = TextStream(given, stop=stop)
        assert together.push(tokens) == text and together.stopped_by == stop[-1]
        visible = given.decode(tokens[:length], skip_special_tokens=True)
        end = stop[-1].replace("</s>", "").replace("<|tool|>", "")
        assert text == visible[: visible.rindex(end)]


def test_a_part_of_a_special_token_ends_no_text(austen):
    stream = TextStream(austen, stop=["<", "s>x"])
    text = "".join(pieces(stream, [*ids(austen, "so"), austen.token_to_id("</s>"), *ids(austen, "x much")]))
    assert (text, stream.stopped_by) == ("sox much", None)


# ---------------------------------------------------------------------- the steps


def test_cleaning_up_spaces_in_pieces_is_cleaning_up_the_whole():
    draw, changed = random.Random(1), 0
    for _ in range(20_000):
        text = "".join(draw.choices(" .?'ntsmverx,", weights=[9, 1, 1, 5, 3, 3, 1, 1, 2, 2, 1, 1, 1],
                                    k=draw.randrange(12)))
        expected = text
        for pair in CLEAN_UP:
            expected = expected.replace(*pair)
        step, got = _CleanUp(), ""
        while text:
            size = draw.randrange(1, 4)
            assert step.rest("") == step.rest(""), "looking at the rest changes nothing"
            got, text = got + step.feed(text[:size]), text[size:]
            changed += 1
        assert got + step.rest("") == expected


@pytest.mark.parametrize("pattern, content", [("ab", "a"), ("aab", "b"), ("aa", "a"), ("aba", ""), ("a", "aa")])
def test_replacing_in_pieces_is_replacing_in_the_whole(pattern, content):
    draw = random.Random(pattern)
    for _ in range(2000):
        text = whole = "".join(draw.choices("ab", k=draw.randrange(12)))
        step, got = _ReplaceInText(pattern, content), ""
        while text:
            size = draw.randrange(1, 4)
            got, text = got + step.feed(text[:size]), text[size:]
            assert whole.replace(pattern, content).startswith(got)
        assert got + step.rest("") == whole.replace(pattern, content)


ODD_TOKENS = ["<unk>", "the", "##x", "a##b", "do not", " do not", "n't", "'s", ".", " .", " ' ", "▁", "▁a▁", "<0x41>",
              "<0xc3>", "<0xA9>", "<0x+F>", "<0x0>", "<0xFF>", "Ġ", "é", "\u0120日", "", "  ", "aa",
              "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("comes_in_pieces, make", [
    (True, lambda d: d.WordPiece()), (True, lambda d: d.WordPiece(prefix="a", cleanup=False)),
    (True, lambda d: d.Metaspace()), (True, lambda d: d.Metaspace(prepend_scheme="never")),
    (True, lambda d: d.ByteLevel()), (True, lambda d: d.ByteFallback()), (True, lambda d: d.Fuse()),
    (True, lambda d: d.Sequence([])), (True, lambda d: d.Strip("a", 1, 0)), (True, lambda d: d.Replace("a", "bb")),
    (True, lambda d: d.Sequence([d.ByteFallback(), d.WordPiece()])),
    (True, lambda d: d.Sequence([d.WordPiece(), d.ByteFallback()])),
    (True, lambda d: d.Sequence([d.Metaspace(), d.ByteLevel(), d.Strip(" ", 2, 0)])),
    (False, lambda d: d.Sequence([d.ByteFallback(), d.ByteFallback()])),
    (False, lambda d: d.Sequence([d.ByteLevel(), d.ByteFallback()])),
    (False, lambda d: d.Sequence([d.Fuse(), d.Metaspace()])),
    (False, lambda d: d.CTC()), (False, lambda d: d.BPEDecoder()),
])
def test_decoders_do_to_odd_tokens_what_the_library_does(comes_in_pieces, make):
    vocab = {token: n for n, token in enumerate(ODD_TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = make(tokenizers.decoders)
    draw = random.Random(0)
    for _ in range(150):
        tokens = [draw.randrange(len(ODD_TOKENS)) for _ in range(draw.randrange(9))]
        prompt, tokens = tokens[:3], tokens[3:]
        assert law(tokenizer, prompt, tokens)[0].comes_in_pieces == comes_in_pieces


# ---------------------------------------------------------------------- transformers


def law(tokenizer, prompt, tokens, stop=(), **options):
    skips = options.get("skip_special_tokens", True)
    shown = with_special(tokenizer, prompt, tokens) if skips else None
    if skips and shown is None:
        stop = [string for string in stop if not any(token in string for token in text_streams.OMITTED)]
    expected, stopped_by = up_to_stop(text_behind(tokenizer, prompt, tokens, skips), list(stop), shown)
    stream = TextStream(tokenizer, prompt, stop, **options)
    sent = [stream.push([token]) for token in tokens]
    assert "".join(sent) + stream.finish() == expected
    assert stream.stopped_by == stopped_by
    return stream, "".join(sent)


@pytest.mark.parametrize("name", ["byte level", "llama", "word piece"])
@pytest.mark.parametrize("cleans_up", [False, True])
def test_fast_tokenizers_of_transformers(transformers, name, cleans_up):
    backend = tokenizer_named(name)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>",
                                                     clean_up_tokenization_spaces=cleans_up)
    draw = random.Random(name)
    differ = 0
    for _ in range(60):
        prompt, tokens = (text_streams.random_tokens(draw, backend) for _ in range(2))
        skips = draw.random() < 0.7
        stop = text_streams.random_stop(draw, text_behind(tokenizer, prompt, tokens, skips))
        stream, sent = law(tokenizer, prompt, tokens, stop, skip_special_tokens=skips)
        assert stream.comes_in_pieces
        differ += text_behind(tokenizer, prompt, tokens, skips) != text_behind(backend, prompt, tokens, skips)
    law(tokenizer, [], tokenizer.encode("Well , is n't it ? He 'll say I 'm ' so '"))
    assert (differ > 0) == (cleans_up and name != "byte level"), "the clean-up changes something, and is followed"


def test_a_class_that_decodes_in_its_own_way_is_right_and_says_that_it_comes_at_the_end(transformers, caplog):
    class Louder(transformers.PreTrainedTokenizerFast):
        def _decode(self, *arguments, **options):
            return super()._decode(*arguments, **options).upper()[::-1]

    tokenizer = Louder(tokenizer_object=tokenizer_named("byte level"))
    with caplog.at_level(logging.WARNING, "batch_manager"):
        stream, sent = law(tokenizer, [], tokenizer.encode("the cat"))
    assert not stream.comes_in_pieces and sent == ""
    assert "a Louder cannot be detokenized incrementally" in caplog.text


def test_slow_tokenizers_of_transformers(transformers):
    words = {word: n for n, word in enumerate(["<unk>", "so", "much", "for", ",", "n't", "?", "</s>", "do"])}

    class Words(transformers.PreTrainedTokenizer):
        def __init__(self, **options):
            super().__init__(unk_token="<unk>", eos_token="</s>", **options)

        vocab_size = len(words)

        def get_vocab(self):
            return dict(words)

        def _tokenize(self, text):
            return text.split()

        def _convert_token_to_id(self, token):
            return words.get(token, 0)

        def _convert_id_to_token(self, index):
            return list(words)[index]

    for cleans_up in (False, True):
        tokenizer = Words(clean_up_tokenization_spaces=cleans_up)
        tokens = tokenizer.encode("so much for do n't , ?") + [tokenizer.eos_token_id]
        for prompt in ([], tokens[:2], [tokenizer.eos_token_id]):
            stream, sent = law(tokenizer, prompt, tokens)
            assert stream.comes_in_pieces and sent
            law(tokenizer, prompt, tokens, ["for do"])
            law(tokenizer, prompt, tokens, skip_special_tokens=False)
        with pytest.raises(InvalidRequestError, match="no token 99"):
            TextStream(tokenizer).push([99])

    tokenizer = transformers.ByT5Tokenizer()
    draw = random.Random(0)
    for _ in range(30):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(20)] + tokenizer.encode("été")
        stream, _ = law(tokenizer, tokens[:5], tokens[5:], ["t"])
        assert not stream.comes_in_pieces


# ---------------------------------------------------------------------- cost


class Counting:
    """Wraps a tokenizer, and counts the calls of its methods `decode` and `id_to_token` in `calls`."""

    def __init__(self, tokenizer):
        self._tokenizer, self.calls = tokenizer, Counter()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **options):
        self.calls["decode"] += 1
        return self._tokenizer.decode(tokens, **options)

    def id_to_token(self, token):
        self.calls["id_to_token"] += 1
        return self._tokenizer.id_to_token(token)


@pytest.mark.parametrize("name", ["byte level", "llama", "word piece"])
def test_a_token_costs_the_same_at_any_length(name):
    tokenizer = Counting(tokenizer_named(name))
    tokens = (ids(tokenizer, "the cat don't ab aab, été. x! ") * 4000)[:40_000]

    def seconds_a_token(first, last):
        best = float("inf")
        for _ in range(3):
            stream = TextStream(tokenizer, stop=["User:", "aabb", "the cats"])
            stream.push(tokens[:first])
            began = time.thread_time()
            for token in tokens[first:last]:
                stream.push([token])
            best = min(best, (time.thread_time() - began) / (last - first))
        return best

    seconds_a_token(0, 2000)
    tokenizer.calls.clear()
    early, late = seconds_a_token(0, 2000), seconds_a_token(38_000, 40_000)
    assert late < 4 * early, f"{late * 1e6:.2f} us a token behind 38,000 tokens, {early * 1e6:.2f} at the beginning"
    assert tokenizer.calls["decode"] == 0
    assert tokenizer.calls["id_to_token"] <= 6, "each token is asked for once, but the first one of a stream"


@pytest.mark.parametrize("name, token", [("byte level", "ÿ"), ("llama", "<0xFF>"), ("llama", "<0x61>")])
def test_tokens_that_become_no_text_cost_no_more(name, token):
    tokenizer = tokenizer_named(name)
    stream, runs = TextStream(tokenizer, stop=["aaab"]), []
    for _ in range(4):
        began = time.thread_time()
        for _ in range(5000):
            stream.push([tokenizer.token_to_id(token)])
        runs.append(time.thread_time() - began)
    assert min(runs[2:]) < 6 * min(runs[:2])
    assert len(stream.finish()) in (20_000, 0)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("tokens", [["a"], [1.5], [None], [[1, 2]], 5, None, [-1], [2**40], np.zeros((1, 2), int)])
@pytest.mark.parametrize("name", ["byte level", "llama", "word piece"])
def test_what_is_no_list_of_tokens_is_refused_and_changes_nothing(name, tokens):
    tokenizer = tokenizer_named(name)
    good = ids(tokenizer, "the cat")
    stream = TextStream(tokenizer)
    sent = stream.push(good[:1])
    with pytest.raises(InvalidRequestError, match="no token"):
        stream.push(tokens if not isinstance(tokens, list) else [good[0], *tokens])
    assert sent + stream.push(good[1:]) + stream.finish() == tokenizer.decode(good)
    with pytest.raises(InvalidRequestError, match="no token"):
        TextStream(tokenizer, tokens)


def test_tokens_behind_the_end_are_refused(austen):
    stream = TextStream(austen)
    stream.finish()
    with pytest.raises(InvalidRequestError, match="after finish"):
        stream.push([5])


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [5], [None]])
def test_stop_strings_that_are_none_are_refused(austen, stop):
    with pytest.raises(InvalidRequestError, match="stop is or contains"):
        TextStream(austen, stop=stop)


@pytest.mark.parametrize("tokenizer", [None, "austen-4m", 5, object()])
def test_what_is_no_tokenizer_is_refused_by_name(tokenizer):
    with pytest.raises(ConfigError, match=f"the tokenizer is of type {type(tokenizer).__name__}"):
        TextStream(tokenizer)


def test_what_cannot_leave_out_special_tokens_is_refused():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode()

    with pytest.raises(ConfigError, match=r"the tokenizer, of type Bytes, cannot decode.*skip_special_tokens=True"):
        TextStream(Bytes())


def test_anything_that_decodes_is_right_at_the_end():
    class Reversed:
        def decode(self, tokens, skip_special_tokens):
            return "".join(map(chr, reversed(tokens)))

    stream = TextStream(Reversed(), [97])
    assert [stream.push([98, 99]), stream.push([100]), stream.finish()] == ["", "", "dcba"]
    stream = TextStream(Reversed())
    stream.push([-5])
    with pytest.raises(InvalidRequestError, match="cannot decode these tokens"):
        stream.finish()


def test_a_tokenizer_that_was_changed_is_read_again():
    tokenizer = text_streams.byte_level()
    tokens = ids(tokenizer, "the cat ab")
    assert "".join(pieces(TextStream(tokenizer), tokens)) == "the cat ab"
    tokenizer.add_special_tokens([tokenizer.id_to_token(tokens[0])])
    assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens) != "the cat ab"
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)
    tokenizer.add_tokens(["new"])
    assert "".join(pieces(TextStream(tokenizer), ids(tokenizer, "the new ab"))) == tokenizer.decode(
        ids(tokenizer, "the new ab"))


def test_a_vocabulary_without_a_token_for_unknown_words_will_do():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("c")
    assert pieces(TextStream(tokenizer), [0, 1, 7, 0]) == ["a", " b", "", " a", ""]


@pytest.mark.parametrize("description", [b'{"type": "Byte"}', b'{"type": "Metaspace"}', b"{}", b"[1]", b"{", b"5"])
def test_a_decoder_that_is_described_in_another_way_is_left_to_the_library(description):
    class Decoder:
        def __getstate__(self):
            return description

    tokenizer = Counting(tokenizer_named("byte level"))
    tokenizer.decoder = Decoder()
    stream = TextStream(tokenizer)
    assert not stream.comes_in_pieces
    assert "".join(pieces(stream, ids(tokenizer, "the cat"))) == "the cat"


def test_a_rule_that_the_library_does_not_follow_is_not_used():
    """If a tokenizer decodes differently than its decoder's description says, TextStream returns all text at the end.

    It may happen with another version of the tokenizers library.
    """
    tokenizer = text_streams.byte_level()

    class Another(Counting):
        def decode(self, tokens, **options):
            return super().decode(tokens, **options).replace("cat", "dog")

    another = Another(tokenizer)
    stream = TextStream(another)
    assert not stream.comes_in_pieces
    assert "".join(pieces(stream, ids(tokenizer, "the cat"))) == "the dog"


def test_errors_are_of_the_package_and_no_library_is_imported_for_them():
    import subprocess

    code = ("import sys\nfrom batch_manager.extras.text import TextStream, chat_prompt\n"
            "print(*sorted({'torch', 'tokenizers', 'transformers', 'jinja2'} & set(sys.modules)))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.split() == [], result.stderr
    assert issubclass(InvalidRequestError, BatchManagerError)
