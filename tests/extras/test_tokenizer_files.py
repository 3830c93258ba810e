"""A tokenizer loaded from a folder is that of transformers' AutoTokenizer, whichever file of the folder names a token.

`batch_manager/weights/file_keys.py` lists the keys of these files; here the list is compared with the code that reads.
"""

import json
import logging
import shutil
from pathlib import Path

import pytest

from batch_manager import ConfigError
from batch_manager.weights.file_keys import READ, WITHOUT_EFFECT, unread

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from batch_manager.extras import chat_template, tokenizer_class, tokenizer_files  # noqa: E402
from batch_manager.extras.text import TextStream  # noqa: E402
from batch_manager.extras.tokenizer import load_tokenizer  # noqa: E402
from tests.extras.text_streams import tokenizer_named  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXTS = ["the cat<|im_end|> said<think>no</think>", "<|im_start|>the  <|im_end|>\n<tool> a b",
         "x <end_of_turn>y . z n't", "<s>the cat</s> ##x", "THE <New Token> the<pad>"]


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": False, **flags}


def size(name):
    return tokenizer_named(name).get_vocab_size()


# Each is a function size of the vocabulary -> {file: contents}.
FOLDERS = {
    "no file": lambda n: {},
    "added_tokens.json": lambda n: {ADDED: {"<|im_start|>": n, "<|im_end|>": n + 1, "<think>": n + 2}},
    "added_tokens.json, special by the config": lambda n: {
        ADDED: {"<|im_end|>": n, "<end_of_turn>": n + 1}, CONFIG: {"eos_token": "<|im_end|>", "pad_token": "<pad>"}},
    "added_tokens.json, special by the map": lambda n: {
        ADDED: {"<|im_end|>": n, "<New Token>": n + 1}, SPECIAL: {
            "eos_token": token("<|im_end|>"), "additional_special_tokens": ["<New Token>", "<tool>"]}},
    "added_tokens_decoder": lambda n: {CONFIG: {"added_tokens_decoder": {
        str(n): token("<|im_start|>", special=True), str(n + 1): token("<|im_end|>", special=True),
        str(n + 2): token("<tool>", lstrip=True, rstrip=True), str(n + 3): token("<New Token>", normalized=True)}}},
    "special only in the config": lambda n: {CONFIG: {"added_tokens_decoder": {
        "0": token("<think>", special=True), "1": token("a b", special=True)}}},
    "flags only in the config": lambda n: {CONFIG: {"added_tokens_decoder": {
        str(n - 1): token("日 本", lstrip=True, rstrip=True, normalized=True)}}},
    "map is not read beside added_tokens_decoder": lambda n: {
        CONFIG: {"added_tokens_decoder": {str(n): token("<|im_end|>")}, "eos_token": "<|im_end|>"},
        SPECIAL: {"additional_special_tokens": ["<tool>"]}, ADDED: {"<end_of_turn>": n + 1}},
    "named tokens": lambda n: {CONFIG: {
        "eos_token": {"__type": "AddedToken", **token("<|im_end|>", lstrip=True)}, "bos_token": None,
        "image_token": "<tool>", "extra_special_tokens": ["<pad>", "<end_of_turn>"]}},
    "a named token of the vocabulary": lambda n: {CONFIG: {"sep_token": "the", "mask_token": "cat"}},
    "named by a dictionary": lambda n: {CONFIG: {"extra_special_tokens": {"start": "<|im_start|>", "tool": "<tool>"}}},
    "ids with a gap": lambda n: {CONFIG: {"added_tokens_decoder": {str(n + 7): token("<|im_end|>", special=True)}}},
    "special tokens in a text are split": lambda n: {CONFIG: {"split_special_tokens": True}},
    "clean-up of spaces": lambda n: {CONFIG: {"clean_up_tokenization_spaces": True}},
    "clean-up of spaces, even for BPE": lambda n: {CONFIG: {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}},
    "what changes nothing": lambda n: {CONFIG: {
        "add_bos_token": True, "add_eos_token": True, "padding_side": "left", "model_max_length": 4, "legacy": False,
        "errors": "strict", "truncation_side": "left", "model_input_names": ["input_ids"], "verbose": True}},
}


def write(folder, name, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer_named(name).save(str(folder / "tokenizer.json"))
    for file, content in files.items():
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **content} if file == CONFIG else content
        (folder / file).write_text(json.dumps(content))
    if CONFIG not in files:
        (folder / CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.parametrize("name", ["byte level", "llama", "metaspace", "word piece"])
def test_ids_and_texts_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    changed = set()
    for case, files in FOLDERS.items():
        folder = write(tmp_path / "model", name, files(size(name)))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert {n: repr(each) for n, each in ours.get_added_tokens_decoder().items()} == {
            n: repr(each) for n, each in theirs.added_tokens_decoder.items()}, case
        for text in TEXTS:
            ids = theirs.encode(text)
            assert ours.encode(text).ids == ids, (case, text)
            for skips in (False, True):
                expected = theirs.decode(ids, skip_special_tokens=skips)
                assert ours.decode(ids, skip_special_tokens=skips) == expected, (case, text)
                stream = TextStream(ours, skip_special_tokens=skips)
                assert "".join(stream.push([n]) for n in ids) + stream.finish() == expected
                assert stream.comes_in_pieces
            if plain.encode(text).ids != ids or plain.decode(ids) != theirs.decode(ids, skip_special_tokens=True):
                changed.add(case)
    assert len(changed) >= 10, "the cases make a difference"


def test_an_added_token_in_a_chat_is_one_token(tmp_path):
    folder = write(tmp_path / "model", "byte level", {CONFIG: {"added_tokens_decoder": {
        str(size("byte level") + n): token(content, special=True)
        for n, content in enumerate(("<|im_start|>", "<|im_end|>"))}}})
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(chat_template.chat_prompt(folder, [{"role": "user", "content": "the"}])).ids
    assert [tokenizer.id_to_token(ids[n]) for n in (0, -1)] == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.decode(ids) == "the"
    stream = TextStream(tokenizer, stop="<|im_end|>")
    assert stream.push(ids) == "the" and stream.stopped_by == "<|im_end|>"


def test_an_id_that_the_vocabulary_does_not_give_is_logged(tmp_path, caplog):
    folder = write(tmp_path / "model", "byte level", FOLDERS["ids with a gap"](size("byte level")))
    with caplog.at_level(logging.WARNING, "batch_manager"):
        load_tokenizer(folder)
    (record,) = caplog.records
    assert {size("byte level"), size("byte level") + 7} <= set(record.args)


@pytest.mark.parametrize(("file", "content"), [
    (CONFIG, "{"), (CONFIG, "[]"), (ADDED, "3"), (SPECIAL, "nothing"), (ADDED, '{"<x>": "1"}'), (ADDED, '{"": 1}'),
    (CONFIG, '{"added_tokens_decoder": {"1": "<x>"}}'), (CONFIG, '{"added_tokens_decoder": {"x": {"content": "<x>"}}}'),
    (CONFIG, '{"added_tokens_decoder": {"1": {"content": 5}}}'), (CONFIG, '{"extra_special_tokens": [5]}'),
    (SPECIAL, '{"eos_token": {"rstrip": true}}'),
])
def test_a_file_of_a_wrong_form_is_refused_by_name(tmp_path, file, content):
    folder = write(tmp_path / "model", "byte level", {})
    (folder / file).write_text(content)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(folder)
    assert file in str(raised.value) and str(raised.value).count(";") >= 2


# ---------------------------------------------------------------------- the list of keys


class Recording(dict):
    """A JSON object that records which of its keys are read."""

    read: set[str]

    def __init__(self, values):
        super().__init__(values)
        self.read = set()

    def get(self, key, *default):
        self.read.add(key)
        return super().get(key, *default)

    def pop(self, key, *default):
        self.read.add(key)
        return super().pop(key, *default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)


def test_the_list_has_the_keys_that_the_code_reads(tmp_path, monkeypatch):
    from batch_manager.models.end_ids import stated_end_ids
    from batch_manager.weights import checkpoint

    given = {}

    def recorded(name, value):
        return given.setdefault(name, []).append(Recording(value)) or given[name][-1]

    read_object, read_configs, read_file = (
        tokenizer_files.read_object, chat_template._configs, checkpoint.HuggingFaceFolder._read)
    monkeypatch.setattr(tokenizer_files, "read_object", lambda path: recorded(path.name, read_object(path)))
    monkeypatch.setattr(chat_template, "_configs", lambda files: [
        recorded(name, value) for name, value in zip((CONFIG, SPECIAL), read_configs(files), strict=True)])

    def read_fields(file):
        fields = read_file(file)
        object.__setattr__(fields, "values", recorded(file.path.name, fields.values))
        return fields

    monkeypatch.setattr(checkpoint.HuggingFaceFolder, "_read", staticmethod(read_fields))
    for files in ({CONFIG: {"clean_up_tokenization_spaces": True, "added_tokens_decoder": {}}}, {}):
        folder = write(tmp_path / "model", "byte level", {CONFIG: {}, SPECIAL: {}, **files})
        for name in ("config.json", "generation_config.json"):
            shutil.copy(MODEL / name, folder)
        load_tokenizer(folder)
        with pytest.raises(ConfigError, match="no chat template"):
            chat_template.chat_prompt(folder, [])
        chat_template.folder_special_tokens(*chat_template.folder_files(folder))
        stated_end_ids(checkpoint.open_checkpoint(folder))
    read = {name: set().union(*(each.read for each in values)) for name, values in given.items()}
    # `_special_tokens` looks up in the map what either file may name.
    for name in (CONFIG, "generation_config.json"):
        assert read[name] == READ[name], name
    assert READ[SPECIAL] <= read[SPECIAL] | read[CONFIG] and read[SPECIAL] <= READ[SPECIAL] | {"chat_template"}
    assert all(not READ[name] & WITHOUT_EFFECT[name] for name in WITHOUT_EFFECT)
    parts = json.loads((folder / "tokenizer.json").read_text())
    assert set(parts) == READ["tokenizer.json"]
    for key in ("unknown", "special"):
        with pytest.raises(Exception, match="expected"):      # the library refuses others
            tokenizers.Tokenizer.from_str(json.dumps({**parts, key: 1}))


def test_every_key_of_transformers_is_read_or_without_effect_or_logged_once(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    known = set(transformers.GenerationConfig().to_dict())
    assert READ["generation_config.json"] | WITHOUT_EFFECT["generation_config.json"] <= known | {"_from_model_config"}
    values = {**dict.fromkeys(known, 7), "eos_token_id": 1}
    left = unread("generation_config.json", values)
    assert set(left) == known - READ["generation_config.json"] - WITHOUT_EFFECT["generation_config.json"]
    assert {"temperature", "top_k", "do_sample", "suppress_tokens", "stop_strings", "repetition_penalty"} <= set(left)
    assert unread("generation_config.json", {"temperature": 1.0, "do_sample": False, "top_k": None}) == []
    folder = write(tmp_path / "model", "byte level", {CONFIG: {
        "add_prefix_space": True, "auto_map": {"A": "b"}, "legacy": 1}})
    with caplog.at_level(logging.INFO, "batch_manager"):
        load_tokenizer(folder)
    (record,) = caplog.records
    assert record.args[1] == "add_prefix_space, auto_map"


def test_a_model_logs_the_keys_of_its_generation_config_once(tmp_path, caplog):
    from batch_manager.models.loading import _usable_end_ids
    from batch_manager.weights.checkpoint import open_checkpoint

    with caplog.at_level(logging.INFO, "batch_manager"):
        _usable_end_ids(open_checkpoint(MODEL), 4096)
    (record,) = caplog.records
    assert record.args[2] == "do_sample, temperature, top_k"


def rebuilt(transformers, folder, name, config):
    """Return the tokenizer that transformers makes of the folder, with the class of this name."""
    (folder / CONFIG).write_text(json.dumps({"tokenizer_class": f"{name}Tokenizer", **config}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ == f"{name}Tokenizer"
    return theirs.backend_tokenizer


@pytest.mark.parametrize("name", tokenizer_class.COMPARED)
def test_the_rules_of_a_class_are_those_of_transformers(tmp_path, name):
    """What transformers rebuilds is equal to itself, and differs from what another class rebuilds."""
    transformers = pytest.importorskip("transformers")
    settings = ({}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"legacy": True}, {"legacy": False},
                {"do_lower_case": False}, {"strip_accents": True}, {"tokenize_chinese_chars": False})
    names = ["<unk>", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", "a", "b", "ab"]
    words = {word: number for number, word in enumerate(names)}
    model = tokenizers.models.WordPiece(words, unk_token="[UNK]") if name == "Bert" else tokenizers.models.BPE(
        words, [("a", "b")])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    made = [rebuilt(transformers, tmp_path, name, config) for config in settings]
    states = [json.loads(each.to_str()) for each in made]
    for tokenizer, mine in zip(made, states, strict=True):
        for config, state in zip(settings, states, strict=True):
            parts = ("normalizer", "pre_tokenizer")
            is_same = [mine[part] for part in parts] == [state[part] for part in parts]
            assert tokenizer_class.splits_otherwise(tokenizer, name, config) == (not is_same), (config, mine)
    if name != "Bert":
        made[0].model = tokenizers.models.BPE(words, [("a", "b")], ignore_merges=True,
                                              byte_fallback=made[0].model.byte_fallback)
        assert tokenizer_class.splits_otherwise(made[0], name, {})


def test_the_tables_of_classes_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentencepiece")               # transformers has other classes without it
    from transformers.models.auto import tokenization_auto as theirs

    from batch_manager.models.registry import _MODEL_TYPES
    from batch_manager.models.transformers.proven_types import PROVEN
    backend, names = theirs.TokenizersBackend, {name for name in dir(transformers) if name.endswith("Tokenizer")}
    generic = (backend, transformers.PythonBackend, transformers.PreTrainedTokenizerBase)
    rebuild = set()
    for name in names | {each.removesuffix("Fast") for each in theirs.TOKENIZER_MAPPING_NAMES.values() if each}:
        found = theirs.tokenizer_class_from_name(name)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase) and found not in generic:
            rebuild |= {name.removesuffix("Tokenizer")} - {"ConvBert", "FNet", "Parakeet"}      # have no own __init__
    assert rebuild - {"MistralCommonBackend", "SentencePieceBackend", "PreTrained"} == {
        *tokenizer_class.COMPARED, *tokenizer_class._NOT_COMPARED}
    for model_type in {*PROVEN, *_MODEL_TYPES.values()}:
        registered = theirs.TOKENIZER_MAPPING_NAMES.get(model_type)
        is_generic = registered in ("TokenizersBackend", "MistralCommonBackend")
        assert (model_type in tokenizer_class._AS_IT_IS) == is_generic, model_type
        assert tokenizer_class._REGISTERED.get(model_type) == (
            None if is_generic or registered is None else registered.removesuffix("Tokenizer"))


@pytest.mark.parametrize("named", [None, "GPT2TokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_the_class_is_the_one_that_transformers_chooses(tmp_path, named):
    transformers = pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "ab"])}
    tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    types = {*tokenizer_class._REGISTERED, *tokenizer_class._AS_IT_IS, "llama", "falcon", "gpt_oss"}
    for model_type in types - ({"biogpt", "ctrl", "gpt-sw3"} if named is None else set()):     # they need other files
        is_in_config = named == "LlamaTokenizer"
        (tmp_path / "config.json").write_text(json.dumps(
            {"model_type": model_type, **({"tokenizer_class": named} if is_in_config else {})}))
        (tmp_path / CONFIG).write_text(json.dumps({"tokenizer_class": named} if named and not is_in_config else {}))
        chosen = type(transformers.AutoTokenizer.from_pretrained(tmp_path)).__name__
        ours = tokenizer_class.class_of(model_type, named)
        assert chosen == ("TokenizersBackend" if ours is None else f"{ours}Tokenizer"), model_type


@pytest.mark.parametrize("name, config, model_type, differs", [
    ("byte level", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, None, True),
    ("byte level", {"tokenizer_class": "GPT2Tokenizer"}, "gpt2", False),
    ("byte level", {"tokenizer_class": "GPT2Tokenizer"}, "mistral", False),
    ("byte level", {"tokenizer_class": "Qwen2TokenizerFast"}, None, True),
    ("byte level", {"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2", True),
    ("byte level", {"tokenizer_class": "GPTNeoXTokenizer"}, "gpt_neox", True),
    ("byte level", {"tokenizer_class": "CodeGenTokenizer"}, "phi", False),
    ("byte level", {"tokenizer_class": "CohereTokenizerFast"}, "cohere2", True),
    ("byte level", {"tokenizer_class": "GemmaTokenizer"}, "gemma2", None),
    ("byte level", {"tokenizer_class": "T5Tokenizer"}, "llama", None),
    ("byte level", {"tokenizer_class": "LlamaTokenizerFast"}, None, False), ("byte level", {}, None, False),
    ("llama", {"tokenizer_class": "LlamaTokenizer"}, None, True), ("llama", {}, None, False)])
def test_a_class_that_changes_ids_is_logged(tmp_path, caplog, name, config, model_type, differs):
    folder = write(tmp_path / "model", name, {CONFIG: config})
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with caplog.at_level(logging.WARNING, "batch_manager"):
        ours = load_tokenizer(folder)
    assert len(caplog.records) == (differs is not False)
    if differs is not None and name == "byte level":        # the library rebuilds no BPE of a Unigram tokenizer
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        texts = [*TEXTS, "e\N{COMBINING ACUTE ACCENT}te 2026", "  it's 12", "the\n\n\ncat"]
        encoded = [(ours.encode(text, add_special_tokens=False).ids, theirs.encode(text, add_special_tokens=False))
                   for text in texts]
        assert any(mine != of_them for mine, of_them in encoded) == differs
