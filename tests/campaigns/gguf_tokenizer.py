"""Compares tokenizers read from GGUF files with other implementations of the same vocabulary.

    python tests/campaigns/gguf_tokenizer.py --model SmolLM2-135M-Instruct.Q4_1.gguf --texts 20000
    python tests/campaigns/gguf_tokenizer.py --sentencepiece --texts 20000      # needs sentencepiece

The first command compares ids and decoded texts with those of transformers, for a file with byte-level BPE. The
pre-tokenizer name `smollm` implies a step that makes each digit a word, which transformers omits. The program compares
texts without numerals with transformers as it is. It compares all texts with transformers after adding the step. The
second command trains SentencePiece BPE models with and without the leading space, writes them as GGUF files, and
compares the tokenizers read from these files with SentencePiece.
"""

import argparse
import random
import tempfile
import unicodedata
from pathlib import Path

from batch_manager.extras.tokenizer import encode, load_tokenizer
from tests.extras.gguf_files import TEXT, sentence_piece_values, write

CHARACTERS = [chr(code) for code in range(32, 127)] + list(
    "\n\t\r  éßñçøΑβжשلם你好世界こ한🙂🇫🇷²³½Ⅷ٣४\u00a0\u200b\u0301'’")


def texts(count, seed):
    draw, words = random.Random(seed), TEXT.split(" ")
    for number in range(count):
        if number % 3 == 0:
            yield "".join(draw.choices(CHARACTERS, k=draw.randrange(80)))
        elif number % 3 == 1:
            yield " ".join(draw.choices(words, k=draw.randrange(1, 40)))
        else:
            codes = [draw.randrange(1, 0x110000) for _ in range(draw.randrange(1, 30))]
            yield "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def beside_transformers(model, count, seed):
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    special = [token.content for token in ours.get_added_tokens_decoder().values()]
    draw, wrong, without_numerals, ids = random.Random(seed), 0, 0, 0
    chosen = [text + draw.choice(special) * (n % 5 == 0) for n, text in enumerate(texts(count, seed))]
    for text in chosen:
        if not any(unicodedata.category(character)[0] == "N" for character in text):
            without_numerals += 1
            wrong += encode(ours, text) != theirs(text).input_ids
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in chosen:
        expected = theirs(text).input_ids
        ids += len(expected)
        wrong += encode(ours, text) != expected
        wrong += ours.decode(expected, skip_special_tokens=False) != theirs.decode(expected)
    print(f"{len(chosen):,} texts, {ids:,} tokens; {without_numerals:,} texts without numerals compared with "
          f"transformers as it is too; {wrong} wrong")
    return wrong


def beside_sentencepiece(count, seed):
    import sentencepiece

    wrong = ids = compared = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus.txt").write_text(TEXT + "Größe über ñandú 你好 世界 こんにちは " * 20, encoding="utf-8")
        for begins_with_space in (True, False):
            sentencepiece.SentencePieceTrainer.train(
                input=f"{folder}/corpus.txt", model_prefix=f"{folder}/model", vocab_size=1500, model_type="bpe",
                byte_fallback=True, character_coverage=0.999, split_digits=True, normalization_rule_name="identity",
                remove_extra_whitespaces=False, add_dummy_prefix=begins_with_space, allow_whitespace_only_pieces=True,
                minloglevel=2)
            theirs = sentencepiece.SentencePieceProcessor(f"{folder}/model.model")
            kinds = {theirs.is_unknown: 2, theirs.is_control: 3, theirs.is_unused: 5, theirs.is_byte: 6}
            pieces = [(theirs.id_to_piece(n), theirs.get_score(n), next((k for of, k in kinds.items() if of(n)), 1))
                      for n in range(theirs.vocab_size())]
            ours = load_tokenizer(write(Path(folder) / "model.gguf", sentence_piece_values(
                pieces, add_space_prefix=begins_with_space)))
            for text in texts(count // 2, seed):
                if any(piece in text for piece in ("<unk>", "<s>", "</s>")):
                    continue
                expected = theirs.encode(text)
                compared, ids = compared + 1, ids + len(expected)
                wrong += encode(ours, text, add_special_tokens=False) != expected
                wrong += ours.decode(expected) != theirs.decode(expected)
    print(f"{compared:,} texts, {ids:,} tokens; {wrong} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sentencepiece", action="store_true")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failures = beside_transformers(options.model, options.texts, options.seed) if options.model else 0
    failures += beside_sentencepiece(options.texts, options.seed) if options.sentencepiece else 0
    raise SystemExit(1 if failures else 0)
