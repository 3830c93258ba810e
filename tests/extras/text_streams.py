"""Passes random texts to TextStream, and compares its pieces with decoding all tokens at once. A seed gives one text.

tests/extras/test_text.py runs 60 texts of each tokenizer. A campaign runs ten thousand in all:

    python tests/campaigns/text_streams.py --first-seed 0 --texts 10000

The training of tokenizers breaks ties differently in every process. A seed therefore gives mostly, but not always, the
same tokens again, and a failure prints its tokens as strings of the vocabulary.
"""

import functools
import os.path
import random
from collections import Counter

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from batch_manager.extras.text import TextStream

OMITTED = ("<s>", "</s>", "<|tool|>", "<unk>", "[UNK]")
SPECIAL, ADDED = ["<s>", "</s>", "<|tool|>"], ["<think>", "été", "a b", "日 本"]
FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
WAVE = "\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}"
WORDS = ["the", "The", "cat", "don't", "he'll", "it's", "we've", "naïve", "e\N{COMBINING ACUTE ACCENT}te", "été",
         "日本語", "文字", "Ελλάδα", "שלום", "\N{GRINNING FACE}", FAMILY, WAVE,
         "x", "ab", "aab", "aa", "...", ".", ",", "!", "?", "'", "n't", "do not", "##x", "▁", "<0x41>", "a b",
         "\N{REPLACEMENT CHARACTER}", "\n", "\t", "  ", "   ", "\x00", "User:", "</s>", "<think>"]
SEPARATORS = [" ", " ", " ", " ", "", "", "\n", "  ", " ' "]


def corpus() -> list[str]:
    draw = random.Random(5)
    plain = [word for word in WORDS if not word.startswith(("<", "▁"))]
    return [" ".join(draw.choices(plain, k=12)) for _ in range(300)]


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token) for token in ADDED])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return _with_added(tokenizer)


def sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(corpus()[::2], trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]))
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    vocab = [(token, -float(rank) / 8) for token, rank in ranks if len(token.lstrip("▁").encode()) < 3 or rank < 60]
    with_bytes = Tokenizer(models.Unigram([*vocab, *((f"<0x{byte:02X}>", -20.0) for byte in range(256))], 0, True))
    with_bytes.pre_tokenizer = pre_tokenizers.Metaspace()
    with_bytes.decoder = decoder
    return _with_added(with_bytes)


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                              decoders.Strip(" ", 1, 0)])


def odd_decoder() -> decoders.Decoder:
    """Return a decoder with every kind of step that supports pieces, in an order that no real tokenizer has."""
    return decoders.Sequence([decoders.Sequence([decoders.Strip("a", 1, 0)]), decoders.ByteFallback(),
                              decoders.Metaspace(prepend_scheme="first"), decoders.Fuse(), decoders.Strip(" ", 3, 0),
                              decoders.Replace("aab", "\N{WHITE STAR}"), decoders.Replace("  ", " ")])


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(corpus(), trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=["[UNK]"]))
    return _with_added(tokenizer)


def words_without_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(corpus(), trainers.WordLevelTrainer(show_progress=False, special_tokens=["<unk>"]))
    return _with_added(tokenizer)


def cannot_be_cut(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = words_without_decoder()
    tokenizer.decoder = decoder
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "llama": lambda: sentence_piece(llama_decoder()),
    "metaspace": lambda: sentence_piece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "gemma": lambda: sentence_piece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                                       decoders.Fuse()])),
    "odd": lambda: sentence_piece(odd_decoder()),
    "word piece": word_piece,
    "no decoder": words_without_decoder,
    "regular expression": lambda: cannot_be_cut(decoders.Replace(Regex("a+"), "b")),
    "ctc": lambda: cannot_be_cut(decoders.CTC()),
    "end of word": lambda: cannot_be_cut(decoders.BPEDecoder(suffix="e")),
}
DECODED_AT_THE_END = ("regular expression", "ctc", "end of word")


@functools.cache
def tokenizer_named(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


# ---------------------------------------------------------------------- one text


def text_behind(tokenizer, prompt: list[int], tokens: list[int], skips: bool) -> str:
    """Return the expected text of the output `tokens`: decode prompt and output together, and drop the prompt's text.

    More exactly, the longest common prefix with the decoded prompt is dropped.

    skips   whether special tokens are left out
    """
    before = tokenizer.decode(prompt, skip_special_tokens=skips)
    text = tokenizer.decode([*prompt, *tokens], skip_special_tokens=skips)
    return text[len(os.path.commonprefix([before, text])):]


Shown = list[tuple[str, bool]]


def with_special(tokenizer, prompt: list[int], tokens: list[int]) -> Shown | None:
    """Return the text of the output `tokens` in which special tokens are shown: pairs (characters, is a special token).

    None if a special token comes where the text without special tokens may still change.
    """
    text, shown, start = text_behind(tokenizer, prompt, tokens, True), [], 0
    name_of = getattr(tokenizer, "id_to_token", None) or tokenizer.convert_ids_to_tokens
    for number, token in enumerate(tokens):
        if name_of(token) in OMITTED and not tokenizer.decode([token], skip_special_tokens=True):
            before = text_behind(tokenizer, prompt, tokens[:number], True)
            if not text.startswith(before):
                return None
            shown += [*((character, False) for character in text[start: len(before)]), (name_of(token), True)]
            start = len(before)
    return [*shown, *((character, False) for character in text[start:])]


def up_to_stop(text: str, stop: list[str], shown: Shown | None = None) -> tuple[str, str | None]:
    """Return (the text before the first complete stop string, that string).

    If several stop strings are complete with the same character, the shortest one counts.

    shown   the same text in which special tokens are shown. Strings with a whole special token are searched there
    """
    shown = shown or [(character, False) for character in text]
    for end in range(1, len(shown) + 1):
        found, so_far = [], joined(shown[:end], False)
        if not shown[end - 1][1]:
            found = [(len(string), string, so_far[: len(so_far) - len(string)]) for string in stop
                     if so_far.endswith(string)]
        for start in range(end):
            string = joined(shown[start:end], True)
            if string in stop and any(is_special for _, is_special in shown[start:end]):
                found.append((len(string), string, joined(shown[:start], False)))
        if found:
            _, string, before = min(found)
            return before, string
    return text, None


def joined(shown: Shown, with_special_tokens: bool) -> str:
    return "".join(characters for characters, is_special in shown if with_special_tokens or not is_special)


def random_text(draw: random.Random, most: int = 14) -> str:
    return "".join(draw.choice(WORDS) + draw.choice(SEPARATORS) for _ in range(draw.randrange(most + 1)))


def random_tokens(draw: random.Random, tokenizer, most: int = 14) -> list[int]:
    """Return tokens of a text, random tokens, byte tokens of a text, or a mixture. Some lists are cut at both ends."""
    size = tokenizer.get_vocab_size()
    byte_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    kind = draw.randrange(5)
    if kind == 0:
        tokens = [draw.randrange(size + 3) for _ in range(draw.randrange(most + 1))]
    elif kind == 1 and byte_ids[0] is not None:
        run = random_text(draw, 4).encode()
        run = bytes(byte if draw.random() < 0.97 else draw.randrange(256) for byte in run)
        tokens = [byte_ids[byte] for byte in run]
    elif kind == 2:
        return random_tokens(draw, tokenizer, most // 2) + random_tokens(draw, tokenizer, most // 2)
    else:
        tokens = tokenizer.encode(random_text(draw, most), add_special_tokens=False).ids
    if tokens and draw.random() < 0.3:
        tokens = tokens[draw.randrange(len(tokens)): draw.randrange(len(tokens) + 1)]
    if draw.random() < 0.3:
        tokens.insert(draw.randrange(len(tokens) + 1), tokenizer.token_to_id(draw.choice([*SPECIAL, *ADDED])))
    return tokens


def random_stop(draw: random.Random, text: str) -> list[str]:
    """Return stop strings: pieces of the text, strings that overlap them, and strings that begin like them."""
    stop: list[str] = []
    for _ in range(draw.choice([0, 0, 1, 1, 2, 3, 6])):
        if text and draw.random() < 0.8:
            start = draw.randrange(len(text))
            string = text[start: start + draw.randrange(1, 8)] + draw.choice(["", "", "", "x", "a", " "])
        else:
            string = draw.choice(["User:", "aa", "aab", "ab", "\n\n", " ", "\N{REPLACEMENT CHARACTER}", *SPECIAL])
        stop.append(string)
        if draw.random() < 0.3:
            stop.append(draw.choice([string[1:], string[:-1], string + string, string[-1]]) or string)
    return stop


def cut(draw: random.Random, tokens: list[int]) -> list[list[int]]:
    largest = draw.choice([1, 1, 2, 5, 30])
    pieces, start = [], 0
    while start < len(tokens):
        size = draw.randrange(0 if draw.random() < 0.1 else 1, largest + 1)
        pieces.append(tokens[start: start + size])
        start += size
    return pieces


def owes_nothing(name: str, tokenizer, tokens: list[int], skips: bool, text: str) -> bool:
    """Return whether later tokens can only add to the text, and not change it.

    TextStream must then have returned all of the text, except for a possible beginning of a stop string.
    """
    if name == "byte level":
        return not text.endswith("\N{REPLACEMENT CHARACTER}")
    if name in ("word piece", "no decoder"):
        return True
    if name in ("llama", "gemma", "metaspace"):
        shown = [token for token in map(tokenizer.id_to_token, tokens)
                 if token is not None and not (skips and token in SPECIAL)]
        return not shown or not shown[-1].startswith("<0x")
    return False


def run(seed: int, name: str, seen: Counter | None = None) -> None:
    """Run TextStream with the random prompt, tokens and stop strings of a seed, in random pieces of tokens.

    Raises AssertionError if it returns a wrong text.

    name   name of the tokenizer
    seen   counts of texts and events, to which this run is added
    """
    seen = Counter() if seen is None else seen
    draw, tokenizer = random.Random(f"{name} {seed}"), tokenizer_named(name)
    skips = draw.random() < 0.7
    prompt = random_tokens(draw, tokenizer) if draw.random() < 0.7 else []
    tokens = random_tokens(draw, tokenizer)
    text = text_behind(tokenizer, prompt, tokens, skips)
    text_with_special = with_special(tokenizer, prompt, tokens) if skips else None
    stop = random_stop(draw, text if text_with_special is None else joined(text_with_special, True))
    if skips and text_with_special is None:
        stop = [string for string in stop if not any(token in string for token in OMITTED)]
    expected, stopped_by = up_to_stop(text, stop, text_with_special)
    shown = name, *([tokenizer.id_to_token(token) for token in some] for some in (prompt, tokens)), stop

    stream = TextStream(tokenizer, prompt, stop, skip_special_tokens=skips)
    assert stream.comes_in_pieces == (name not in DECODED_AT_THE_END)
    sent, pushed = "", []
    for piece in cut(draw, tokens):
        given = draw.choice([piece, piece, tuple(piece), np.array(piece, np.int32)])
        was_stopped = stream.stopped_by
        new = stream.push(given)
        assert not (was_stopped and new), "text after a stop string"
        sent, pushed = sent + new, pushed + piece
        assert expected.startswith(sent), (*shown, expected, sent)
        if stream.comes_in_pieces and stream.stopped_by is None:
            certain = text_behind(tokenizer, prompt, pushed, skips)
            if owes_nothing(name, tokenizer, [*prompt, *pushed], skips, certain):
                most = max((len(string) for string in stop), default=1) - 1
                assert len(certain) - len(sent) <= most, f"{certain!r} is certain, {sent!r} was sent"
                seen["pushes that owed nothing"] += 1
    sent += stream.finish()
    assert sent == expected, (*shown, expected, sent)
    assert stream.stopped_by == stopped_by
    assert stream.finish() == ""
    seen["texts"] += 1
    seen["tokens"] += len(tokens)
    seen["characters"] += len(expected)
    seen["stopped"] += stopped_by is not None
    seen["stopped by a special token"] += skips and any(token in (stopped_by or "") for token in OMITTED)
    seen["prompts"] += bool(prompt)
    seen["texts with U+FFFD"] += "\N{REPLACEMENT CHARACTER}" in text
