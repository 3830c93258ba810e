"""Tokenizers from GGUF files give the ids of the original tokenizers for random texts. Unknown kinds are refused."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from batch_manager import ConfigError, InvalidRequestError, Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
pytest.importorskip("jinja2")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from batch_manager.extras.llm import LLM  # noqa: E402
from batch_manager.extras.text import TextStream, chat_prompt  # noqa: E402
from batch_manager.extras.tokenizer import encode, load_tokenizer  # noqa: E402
from batch_manager.testing.scripted_backend import ScriptedBackend  # noqa: E402
from tests.extras.gguf_files import (  # noqa: E402
    CHATML,
    CONTROL,
    NORMAL,
    SPECIAL,
    TEXT,
    USER_DEFINED,
    byte_level_values,
    sentence_piece_values,
    trained_merges,
    trained_pieces,
    write,
    write_model,
)

CHARACTERS = [chr(code) for code in range(32, 127)] + list("\n\t\r  éßñçøΑβжשم你界こ한🙂👩‍👧²³½Ⅷ٣\u00a0\u200b\u0301'’")
PIECES = trained_pieces()


def random_texts(count, seed=0):
    draw, words = random.Random(seed), TEXT.split(" ")
    for number in range(count):
        if number % 3 == 0:
            yield "".join(draw.choices(CHARACTERS, k=draw.randrange(60)))
        elif number % 3 == 1:
            yield " ".join(draw.choices(words, k=draw.randrange(1, 20))).swapcase() + " I'LL  go 12345 e\u0301"
        else:
            codes = [draw.randrange(1, 0x110000) for _ in range(draw.randrange(1, 20))]
            yield "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def originals():
    """Return {GGUF name of a pre-tokenizer: (pre-tokenizer, normalizer)} of the original tokenizers.

    They come from transformers, or equal those in the tokenizer.json of a model.
    """
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as PATTERNS
    from transformers.models.cohere.tokenization_cohere import CohereTokenizer
    from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer

    def of(tokenizer_class):
        backend = tokenizer_class().backend_tokenizer
        return backend.pre_tokenizer, backend.normalizer

    def split_by(pattern):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                      pre_tokenizers.ByteLevel(add_prefix_space=False)])
    gpt2, neox = of(transformers.GPT2Tokenizer), of(GPTNeoXTokenizer)
    found = {name: (split_by(PATTERNS[name]), None)
             for name in ("llama-bpe", "llama3", "llama-v3", "dbrx", "tekken", "gpt-4o")}
    found |= dict.fromkeys(("smollm", "starcoder", "refact"), (digits, None))
    return {**found, "gpt-2": gpt2, "phi-2": gpt2, "olmo": neox, "mpt": neox, "command-r": of(CohereTokenizer),
            "qwen2": of(transformers.Qwen2Tokenizer)}


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """Write a GGUF file with a byte-level tokenizer and a chat template, but without weights. Return its path."""
    vocabulary, merges = trained_merges(pre_tokenizers.ByteLevel(add_prefix_space=False))
    values = byte_level_values("smollm", vocabulary, merges, user_defined=["<think>", "   "])
    values["tokenizer.chat_template"] = "{{ bos_token }}" + CHATML
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", values)


def test_byte_level_tokenizers_give_the_ids_of_the_originals(tmp_path):
    from batch_manager.extras.gguf_tokenizer import _PRE_TOKENIZERS

    known = originals()
    assert set(known) == set(_PRE_TOKENIZERS)
    for number, (pre, (pre_tokenizer, normalizer)) in enumerate(known.items()):
        vocabulary, merges = trained_merges(pre_tokenizer, normalizer)
        whole_words = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
        if whole_words:     # a token that no merges produce
            vocabulary["Ġtokenizer"] = len(vocabulary)
        original = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
        original.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            original.normalizer = normalizer
        values = byte_level_values(pre, vocabulary, merges)
        values["tokenizer.ggml.add_bos_token"] = False
        ours = load_tokenizer(write(tmp_path / f"{number}.gguf", values))
        original.add_special_tokens(SPECIAL)
        for text in [*random_texts(300, seed=number), "a tokenizer<|im_end|>\nand\u00e9<|im_start|>", ""]:
            expected = original.encode(text).ids
            assert encode(ours, text) == expected, (pre, text)


def sentence_piece_ids(text, begins_with_space, pieces=PIECES):
    """Encode a text by the definition of SentencePiece's BPE, and llama.cpp's, with a vocabulary. Return the ids.

    The two neighbours whose union has the highest score are joined, the leftmost first, until no union of neighbours is
    a piece. A character that is no piece is encoded as its bytes."""
    ids, scores = {piece: n for n, (piece, _, _) in enumerate(pieces)}, {piece: score for piece, score, _ in pieces}
    parts = list(("\u2581" * bool(begins_with_space and text) + text).replace(" ", "\u2581"))
    while True:
        best = max(((scores[pair], -n) for n in range(len(parts) - 1)
                    if (pair := parts[n] + parts[n + 1]) in ids and pieces[ids[pair]][2] == NORMAL), default=None)
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [number for part in parts for number in (
        [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])]


# Llama 2's runs of spaces, in its order, and marks of Baichuan's.
SPACES = [("\u2581" * n, -1e9, NORMAL) for n in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)]
MARKS = [(token, score, NORMAL) for token, score in (
    ("--", -700.0), ("->", -701.0), ("-->", 0.0), ("---", 0.0), ("<b>", 0.0), ("\u2581t", 0.0), ("-", -702.0),
    (">", -703.0), ("<", -704.0))]


@pytest.mark.parametrize("more", [SPACES, MARKS], ids=["runs of spaces", "marks"])
def test_equal_scores_merge_the_leftmost_pair_first(tmp_path, more):
    pieces = [*(piece for piece in PIECES if piece[0] not in {token for token, _, _ in more}), *more]
    tokenizer, draw = load_tokenizer(write(tmp_path / "a.gguf", sentence_piece_values(pieces))), random.Random(0)
    parts = ["-", "-", "--", ">", "<b>", " t", "the", "Emma", *(" " * n for n in range(1, 40))]
    for text in [" " * n + "x" for n in range(80)] + ["".join(draw.choices(parts, k=draw.randrange(1, 12)))
                                                      for _ in range(300)]:
        expected = sentence_piece_ids(text, True, pieces)
        assert encode(tokenizer, text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == text


def test_gemma_3_merges_to_user_defined_tokens_in_the_order_of_its_tokenizer_json(tmp_path):
    """transformers made that order from scores of 0 for these tokens."""
    base = pytest.importorskip("transformers.tokenization_utils_base")
    marks = [*(of * n for of in "\n \t" for n in range(1, 32) if of * n not in " \t"), "<table>", "</i>", "<b"]
    pieces = [*PIECES[:3], *((mark, -1000.0, USER_DEFINED) for mark in marks), ("\t", -1e4, NORMAL),
              *(piece for piece in PIECES[3:] if piece[0] not in (*marks, "\t", "\u2581\u2581"))]
    ours = load_tokenizer(write(tmp_path / "a.gguf", sentence_piece_values(pieces, add_space_prefix=False), "gemma3"))
    names = [piece.replace(" ", "\u2581") if kind == USER_DEFINED else piece for piece, _, kind in pieces]
    scores = {name: 0.0 if kind == USER_DEFINED else score for name, (_, score, kind) in zip(names, pieces)
              if kind in (NORMAL, USER_DEFINED)}
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = base.generate_merges({name: vocabulary[name] for name in scores}, scores)
    original = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    original.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in names[3 : 3 + len(marks)]])
    draw = random.Random(0)
    for text in random_texts(300):
        for _ in range(3):
            text += draw.choice([*" \n\t\u2581", "<b", "</i>"]) * draw.choice([1, 2, 3, 31, 32, 40, 70]) + text[:5]
        expected = original.encode(text).ids
        assert encode(ours, text, add_special_tokens=False) == expected
        assert ours.decode(expected) == text.replace("\u2581", " ")


def test_special_tokens_of_phi_3_absorb_spaces(tmp_path):
    """As in Phi-3's tokenizer.json and in llama.cpp; a text after a special token begins with a space again."""
    pieces = [*PIECES[:2], ("</s>", 0.0, USER_DEFINED), *PIECES[3:],
              *((name, 0.0, CONTROL) for name in ("<|endoftext|>", "<|user|>", "<|end|>"))]
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", sentence_piece_values(pieces), "phi3"))
    names = {name: number for number, (name, _, _) in enumerate(pieces)}
    for name in ("<|user|>", "<|end|>", "</s>", "<|endoftext|>", "<s>"):
        absorbs = name not in ("<|endoftext|>", "<s>")
        expected = [*sentence_piece_ids("and", True), names[name],
                    *sentence_piece_ids("Emma" if absorbs else "\n Emma", True)]
        assert encode(tokenizer, f"and{name}\n Emma", add_special_tokens=False) == expected, name


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_sentence_piece_joins_by_scores_and_falls_back_to_bytes(tmp_path, begins_with_space):
    path = write(tmp_path / "a.gguf", sentence_piece_values(PIECES, add_space_prefix=begins_with_space))
    tokenizer = load_tokenizer(path)
    for text in random_texts(250):
        expected = sentence_piece_ids(text, begins_with_space)
        assert encode(tokenizer, text, add_special_tokens=False) == expected
        assert encode(tokenizer, text) == [1, *expected], "bos where the file does not say"
        assert tokenizer.decode(expected) == text
        stream = TextStream(tokenizer)
        assert "".join(stream.push([token]) for token in expected) + stream.finish() == text
        assert stream.comes_in_pieces


def test_what_a_text_begins_and_ends_with_is_the_files_word(tmp_path):
    values = byte_level_values("llama-bpe", *trained_merges(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300))
    bos, eos = values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]

    def around(**more):
        path = write(tmp_path / "a.gguf", {**values, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}})
        ids = encode(load_tokenizer(path), "x")
        assert encode(load_tokenizer(path), "x", add_special_tokens=False) == [token for token in ids
                                                                                if token not in (bos, eos)]
        return ids[0] == bos, ids[-1] == eos

    assert around() == (True, False)
    assert around(add_bos_token=False) == (False, False)
    assert around(add_eos_token=True) == (True, True)
    assert around(pre="smollm") == (False, False)
    assert around(pre="smollm", add_bos_token=True, add_eos_token=True) == (True, True)


def test_control_tokens_are_special_and_user_defined_ones_are_text(smollm):
    tokenizer = load_tokenizer(smollm)
    ids = encode(tokenizer, "<|im_start|>hi<think>   5<|im_end|>")
    names = [tokenizer.id_to_token(token) for token in ids]
    assert names[0] == "<|im_start|>" and names[-1] == "<|im_end|>" and "<think>" in names and "   " in names
    assert tokenizer.decode(ids) == "hi<think>   5"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<think>   5<|im_end|>"


def test_a_conversation_by_the_files_template(smollm):
    talk = [{"role": "user", "content": "Hello"}]
    prompt = chat_prompt(smollm, talk)
    assert prompt == "<|begin|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = load_tokenizer(smollm)
    answer = encode(tokenizer, "I am here. ")
    backend = ScriptedBackend(vocab_size=tokenizer.get_vocab_size(), max_seq_len=1000, num_blocks=500, verify=False,
                              script=lambda history: answer[len(history) % len(answer)])
    with LLM(smollm, parts=Parts(backend=backend), max_batch_size=2) as llm:
        completion = llm.chat(talk, max_tokens=len(answer))
        assert completion.error is None and sorted(completion.text) == sorted("I am here. ")
        assert "".join(llm.stream(talk, max_tokens=len(answer))) == completion.text


def test_texts_of_a_model_that_is_one_file(tmp_path):
    """LLM runs a GGUF file, and its stream yields whole characters although random weights give random bytes."""
    talk = [{"role": "user", "content": "Who is Emma?"}]
    with LLM(write_model(tmp_path / "model.gguf"), max_batch_size=2, num_threads=1) as llm:
        assert llm.info.end_ids == (len(load_tokenizer(tmp_path / "model.gguf").get_vocab()) - 1,)
        completion = llm.chat(talk, max_tokens=200, temperature=0, ignore_eos=True)
        assert completion.error is None and len(completion.tokens) == 200
        assert "".join(llm.stream(talk, max_tokens=200, temperature=0, ignore_eos=True)) == completion.text
        assert llm.tokenizer.decode(completion.tokens) == completion.text
        sampled = llm.generate([talk] * 4, max_tokens=100, seed=4)
        assert [each.error for each in sampled] == [None] * 4 and len({each.text for each in sampled}) == 1


def test_the_openai_service_of_a_model_that_is_one_file(tmp_path):
    pytest.importorskip("llguidance")
    from batch_manager.extras.openai import OpenAIService

    path = write_model(tmp_path / "model.gguf")
    schema = {"type": "object", "additionalProperties": False, "required": ["age"],
              "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}}}

    async def ask():
        async with await AsyncEngine.start(path, takes_all=True, optional_params=TrtGptModelOptionalParams(
                max_batch_size=2, num_threads=1)) as engine:
            service = OpenAIService(engine, path)
            answer = await service.accept(json.dumps({
                "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60, "seed": 1, "response_format": {
                    "type": "json_schema", "json_schema": {"name": "who", "schema": schema}}}).encode(), True)
            return json.loads(await answer.whole())

    said = asyncio.run(ask())
    assert said["model"] == "model.gguf" and said["choices"][0]["finish_reason"] == "stop"
    assert 10 <= json.loads(said["choices"][0]["message"]["content"])["age"] <= 99


def test_templates_by_name_and_a_file_that_changes(tmp_path):
    values = byte_level_values("smollm", *trained_merges(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300))
    path = tmp_path / "a.gguf"
    write(path, {**values, "tokenizer.chat_template": "{{ eos_token }}", "tokenizer.chat_template.tool_use": "tools"})
    assert chat_prompt(path, []) == "<|im_end|>" and chat_prompt(path, [], [{"name": "f"}]) == "tools"
    write(path, {**values, "tokenizer.chat_template": "another one"})
    assert chat_prompt(path, [], []) == "another one"
    write(path, values)
    with pytest.raises(ConfigError, match=r"a\.gguf' has no chat template; expected tokenizer\.chat_template"):
        chat_prompt(path, [])
    with pytest.raises(ConfigError, match="violated the sandbox"):
        chat_prompt(write(path, {**values, "tokenizer.chat_template": "{{ ''.__class__.__mro__ }}"}), [])
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_prompt(path, [])
    with pytest.raises(ConfigError, match="the GGUF file .* cannot be opened"):
        load_tokenizer(path)


BYTES = byte_level_values("smollm", *trained_merges(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300))
SENTENCES = sentence_piece_values(PIECES)
TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@pytest.mark.parametrize(("values", "message"), [
    ({**BYTES, "tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; expected 'gpt2' or 'llama'"),
    ({**BYTES, "tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    ({**BYTES, "tokenizer.ggml.model": 3}, "tokenizer.ggml.model is 3"),
    ({**BYTES, "tokenizer.ggml.pre": "deepseek-coder"}, "tokenizer.ggml.pre is 'deepseek-coder'; expected one of"),
    ({**BYTES, "tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is 'default'"),
    ({**BYTES, "tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
    ({**BYTES, TOKENS: None}, "tokenizer.ggml.tokens is missing; expected a list of strings"),
    ({**BYTES, TOKENS: [1, 2]}, "tokenizer.ggml.tokens is an array; expected a list of strings"),
    ({**BYTES, TOKENS: [*BYTES[TOKENS][:-1], "a"]}, "unique tokens of 1 to 1,024 characters"),
    ({**BYTES, TOKENS: [*BYTES[TOKENS][:-1], ""]}, "unique tokens"),
    ({**BYTES, TOKENS: [*BYTES[TOKENS][:-1], "x" * 1025]}, "unique tokens"),
    ({**BYTES, KINDS: None}, "token_type is missing"),
    ({**BYTES, KINDS: BYTES[KINDS][:-1]}, "one per token"),
    ({**BYTES, KINDS: [*BYTES[KINDS][:-1], 7]}, "token_type is a list with the entry 7; expected types from 1 to 6"),
    ({**BYTES, "tokenizer.ggml.merges": None}, "merges is missing"),
    ({**BYTES, "tokenizer.ggml.merges": ["ab"]}, "merges is a list with the entry 'ab'; expected two tokens"),
    ({**BYTES, "tokenizer.ggml.merges": ["a b c"]}, "two tokens with a space"),
    ({**BYTES, "tokenizer.ggml.merges": ["a zq\u00e9"]}, "the library tokenizers rejects the vocabulary of"),
    ({**BYTES, "tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1; expected true or false"),
    ({**BYTES, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id is missing"),
    ({**BYTES, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}, "a token id, 0.."),
    ({**SENTENCES, "tokenizer.ggml.scores": None}, "scores is missing"),
    ({**SENTENCES, "tokenizer.ggml.scores": [float("nan")] * len(PIECES)}, "a list with NaN or infinity"),
    ({**SENTENCES, "tokenizer.ggml.scores": [0.0] * len(PIECES)}, "scores is equal for"),
    ({**sentence_piece_values([*PIECES, *(SPACES[n] for n in (0, 3, 10))])}, "scores is equal for"),
    ({**SENTENCES, "tokenizer.ggml.unknown_token_id": 10**6}, "unknown_token_id is 1000000"),
    ({**SENTENCES, "tokenizer.ggml.remove_extra_whitespaces": True}, "this text normalization is not supported"),
    ({**SENTENCES, TOKENS: [*SENTENCES[TOKENS], "<tool>"], KINDS: [*SENTENCES[KINDS], USER_DEFINED]},
     "false, because the file does not specify whether the space prefix also precedes text after the token '<tool>'"),
], ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "")
def test_what_is_not_known_or_broken_is_refused_by_name(tmp_path, values, message):
    path = write(tmp_path / "a.gguf", values)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(path)
    assert message in str(raised.value) and str(path) in str(raised.value)
    assert str(raised.value).count(";") >= 2


@pytest.mark.parametrize(("architecture", "values"), [("gemma2", SENTENCES), ("phi3", BYTES)])
def test_an_architecture_whose_tokenizer_does_more_is_refused(tmp_path, architecture, values):
    with pytest.raises(ConfigError, match=f"general.architecture is '{architecture}'"):
        load_tokenizer(write(tmp_path / "a.gguf", values, architecture))


def test_the_page_names_what_is_refused():
    from batch_manager.extras.gguf_tokenizer import _INCOMPLETE_METADATA

    page = (Path(__file__).resolve().parents[2] / "docs" / "texts.md").read_text()
    assert all(f"`{architecture}`" in page for architecture in _INCOMPLETE_METADATA)


def test_a_shard_that_is_not_the_first_is_named(tmp_path):
    path = write(tmp_path / "model-00002-of-00004.gguf", {"split.no": 1, "split.count": 4})
    for load in (load_tokenizer, LLM, lambda path: chat_prompt(path, [{"role": "user", "content": "Hello"}])):
        with pytest.raises(ConfigError, match="00002-of-00004.gguf is shard 2 of a model; expected the first shard"):
            load(path)


def test_damaged_files_are_refused_or_make_a_tokenizer(tmp_path):
    draw, path, outcomes = random.Random(0), tmp_path / "a.gguf", []
    whole = [write(path, {**values, "tokenizer.chat_template": CHATML}).read_bytes() for values in (BYTES, SENTENCES)]
    for _ in range(250):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.choice((1, 1, 2, 8))):
            at, how = draw.randrange(len(data)), draw.random()
            if how < 0.6:
                data[at] = draw.randrange(256)
            elif how < 0.8:
                del data[at : at + draw.randrange(1, 20)]
            else:
                data[at:at] = draw.randbytes(draw.randrange(1, 10))
        path.write_bytes(data)
        for read in (load_tokenizer, lambda path: chat_prompt(path, [{"role": "user", "content": "Hello"}])):
            try:
                read(path)
                outcomes.append(True)
            except (ConfigError, InvalidRequestError):
                outcomes.append(False)
    assert 20 < sum(outcomes) < len(outcomes) - 20
