"""The time and memory for reading a checkpoint, and the length of messages about it, are bounded for every file."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from batch_manager.errors import ModelLoadError, UnsupportedModelError
from batch_manager.layers.rotary import inverse_frequencies
from batch_manager.models import load_model, read_spec
from batch_manager.weights import safetensors_source
from batch_manager.weights.folder import CheckpointFolder
from batch_manager.weights.json_file import MAX_JSON_BYTES, MAX_JSON_VALUES, Fields, parse_json, read_json_file, shown
from batch_manager.weights.safetensors_source import SafetensorsWeights

HOSTILE = "\x1b[31m\nERROR all is well\udc80"


def refusal_of(folder, **options) -> str:
    with pytest.raises(ModelLoadError) as refusal:
        load_model(folder, device="cpu", dtype="float32", **options)
    text = str(refusal.value)
    assert text.isprintable() and len(text) < 2000
    return text


def with_header(checkpoint, header, data=b""):
    text = json.dumps(header).encode()
    checkpoint.write()
    (checkpoint.folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return checkpoint.folder


def entry(**fields):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}


def seconds_of(action) -> float:
    started = time.thread_time()
    with pytest.raises(ModelLoadError):
        action()
    return time.thread_time() - started


def test_a_key_that_occurs_twice_is_found_in_linear_time():
    def seconds(count):
        data = ("{" + ",".join(f'"{n}":0' for n in range(count)) + f',"{count - 1}":0}}').encode()
        return min(seconds_of(lambda: parse_json(data, "x")) for _ in range(3))

    assert seconds(20_000) < 60 * seconds(1000), "20 times as many keys"


@pytest.mark.parametrize("data, word", [
    (b" " * (MAX_JSON_BYTES + 1), "bytes"), (b"[" + b"[]," * MAX_JSON_VALUES + b"]", "values"),
    (b'{"a":' * (MAX_JSON_VALUES + 1), "values"), (b'{"a":' * 10_000, "nested"), (b'{"a":1,"a":2}', "'a' occurs twice"),
])
def test_json_is_bounded(data, word, tmp_path):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ModelLoadError, match=word) as refusal:
        read_json_file(tmp_path / "x.json", "x.json")
    assert "x.json" in str(refusal.value)


def test_a_value_as_deep_as_the_stack_is_named_or_too_deep(checkpoint):
    for depth in range(800, 1000):
        checkpoint.write()
        for name in ("rope_scaling", "hidden_size"):
            text = json.dumps({**checkpoint.config, name: "deep"}).replace('"deep"', "[" * depth + "]" * depth)
            (checkpoint.folder / "config.json").write_text(text)
            text = refusal_of(checkpoint.folder)
            assert "config.json" in text and (name in text or "nested" in text)


def test_what_is_shown_of_a_value_is_short():
    for value in ("x" * 10**6, ["x" * 500] * 500, {str(n): n for n in range(10**5)}, 10**4000, [[[[1]]]]):
        assert len(shown(value)) < 700


@pytest.mark.parametrize("name", [HOSTILE, "n" * 10**5])
def test_names_from_files_are_printable_and_short_in_messages(name, checkpoint):
    name = name.replace("\udc80", "")
    checkpoint.tensors[name] = torch.ones(1)
    refusal_of(checkpoint.write())
    refusal_of(with_header(checkpoint, {name: entry(dtype=7)}, bytes(8)))
    refusal_of(with_header(checkpoint, {name: entry(data_offsets=[4, 12])}, bytes(12)))
    refusal_of(with_header(checkpoint, {name: entry(dtype=name)}, bytes(8)))
    (checkpoint.folder / "model.safetensors").unlink()
    for tensor, shard in ((name, 7), ("lm_head.weight", name), (name, "first.safetensors")):
        refusal_of(checkpoint.write_shards({tensor: shard}))
    checkpoint.config["rope_parameters"] = {"rope_type": "default", name: 1}
    checkpoint.write_config()
    refusal_of(checkpoint.folder)
    checkpoint.config["architectures"] = [name]
    checkpoint.write_config()
    assert "config.json" in refusal_of(checkpoint.folder)


def test_a_link_out_of_the_folder_to_a_hostile_name_is_shown_as_text(checkpoint):
    outside = checkpoint.folder.parent / "\x1b[31m\n"
    outside.write_bytes(b"")
    checkpoint.write_config()
    (checkpoint.folder / "model.safetensors").symlink_to(outside)
    assert "out of the folder" in refusal_of(checkpoint.folder)


def test_a_link_inside_the_folder_is_as_good_as_the_file(checkpoint):
    checkpoint.write()
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "real")
    (checkpoint.folder / "model.safetensors").symlink_to("real")
    load_model(checkpoint.folder, device="cpu")


def test_a_shard_that_is_a_link_inside_the_folder_has_the_name_of_the_link(checkpoint):
    checkpoint.write_shards()
    (checkpoint.folder / "second.safetensors").rename(checkpoint.folder / "real")
    (checkpoint.folder / "second.safetensors").symlink_to("real")
    load_model(checkpoint.folder, device="cpu")


@pytest.mark.parametrize("header, data, words", [
    ({"a": entry(shape=[3])}, 8, ["'a'", "shape", "12 bytes"]),
    ({"a": entry(), "b": entry()}, 8, ["'b'", "data_offsets"]),
    ({"a": entry(), "b": entry(data_offsets=[12, 20])}, 20, ["'b'", "data_offsets"]),
    ({"a": entry(dtype="I8", data_offsets=[8, 0])}, 8, ["'a'", "data_offsets"]),
    ({"a": entry()}, 9, ["data_offsets", "9 bytes"]),
    ({"a": entry(data_offsets=[0, 2**63])}, 8, ["a", "data_offsets"]),
    ({"a": entry(data_offsets=[0])}, 8, ["a", "data_offsets"]),
    ({"a": entry(shape=[True, 2])}, 8, ["a", "shape"]),
    ({"a": entry(shape=[2, *[1] * 8])}, 8, ["a", "shape"]),
    ({"a": entry(shape=[2**40] * 8)}, 8, ["'a'", "shape"]),
    ({"a": entry(dtype=None)}, 8, ["a", "dtype"]),
    ({"a": ["F32", [2], [0, 8]]}, 8, ["a", "object"]),
    ({"a": entry(dtype="F33")}, 8, ["F33"]),
    ({"__metadata__": {"a": 1}}, 0, ["string"]),
    ({"model.norm.weight": entry(dtype="F64", shape=[1])}, 8, ["model.embed_tokens.weight"]),
])
def test_a_broken_header_names_file_tensor_and_field(header, data, words, checkpoint):
    text = refusal_of(with_header(checkpoint, header, bytes(data)))
    assert all(word in text for word in [str(checkpoint.folder), *words]), text


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 2**63) + b"{}"])
def test_a_file_shorter_than_it_says_is_incomplete(content, checkpoint):
    checkpoint.write()
    (checkpoint.folder / "model.safetensors").write_bytes(content)
    assert "not a complete safetensors file" in refusal_of(checkpoint.folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_named(name, checkpoint, monkeypatch):
    """If config.json or the tensor file cannot be opened, the error names the file.

    A patch of Path.open raises the PermissionError, because root may open every file.
    """
    checkpoint.write()
    real = Path.open

    def refuse(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    text = refusal_of(checkpoint.folder)
    assert name in text and "Permission denied" in text


def test_what_the_library_refuses_later_is_refused_by_name(checkpoint, monkeypatch):
    class Reader:
        def get_tensor(self, name):
            raise RuntimeError("the disk is gone" + "!" * 10_000)

    monkeypatch.setattr(safetensors_source, "safe_open", lambda *_, **__: Reader())
    text = refusal_of(checkpoint.write())
    assert "model.embed_tokens.weight" in text and "the disk is gone" in text


@pytest.mark.parametrize("replaced, words", [
    (lambda tensor: tensor[:, :5].contiguous(), "[11, 5]"), (lambda tensor: tensor.half(), "torch.float16"),
    (lambda tensor: tensor[0].clone(), "[8]")], ids=["shape", "dtype", "rank"])
def test_a_file_that_is_replaced_between_its_header_and_its_data_is_refused_by_name(
        replaced, words, checkpoint, monkeypatch):
    def open_another(path, **options):
        save_file({**checkpoint.tensors, name: replaced(checkpoint.tensors[name])}, path)
        return really_open(path, **options)

    name, really_open = "model.embed_tokens.weight", safetensors_source.safe_open
    monkeypatch.setattr(safetensors_source, "safe_open", open_another)
    text = refusal_of(checkpoint.write())
    assert all(word in text for word in ("model.safetensors", name, words, "[11, 8]", "'F32'", "replaced"))


def test_a_file_that_shrinks_while_the_library_opens_it_is_refused_by_name(checkpoint, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("unable to mmap 4711 bytes from file")

    monkeypatch.setattr(safetensors_source, "safe_open", fail)
    text = refusal_of(checkpoint.write())
    assert "model.safetensors" in text and "unable to mmap 4711 bytes" in text


def test_a_tied_head_of_another_type_or_without_its_embedding_is_refused_by_name(checkpoint):
    checkpoint.config["tie_word_embeddings"] = True
    for head in (torch.ones(11, 8).to(torch.float8_e4m3fn), torch.ones(11, 9)):
        checkpoint.tensors["lm_head.weight"] = head
        assert "lm_head.weight" in refusal_of(checkpoint.write())
    weights = SafetensorsWeights(CheckpointFolder(checkpoint.folder), torch.device("cpu"), torch.float32)
    with pytest.raises(ModelLoadError, match="differs"):
        weights.tied("lm_head.weight", "absent")


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("parameters, name", [
    ({**YARN, "beta_slow": 1e-305, "original_max_position_embeddings": 2**24}, "beta_slow"),
    ({**YARN, "beta_fast": 1e300}, "beta_fast"),
    ({**YARN, "mscale": 1, "mscale_all_dim": -0.5}, "mscale_all_dim"), ({**YARN, "factor": 1e200}, "factor"),
    ({**YARN, "attention_factor": 1e39}, "attention_factor"),
])
def test_numbers_that_overflow_are_refused_by_name(parameters, name, checkpoint):
    checkpoint.config["rope_parameters"] = parameters
    assert name in refusal_of(checkpoint.write())


@pytest.mark.parametrize("parameters", [
    {**YARN, "beta_slow": 1e-30, "beta_fast": 1e30}, {**YARN, "factor": 1e30, "mscale": 1e30, "mscale_all_dim": 1e-30},
    {**YARN, "factor": 1e-30}, {"rope_type": "llama3", "factor": 1e30, "low_freq_factor": 1e-30, "high_freq_factor": 1},
])
def test_the_largest_numbers_that_are_taken_give_frequencies(parameters, checkpoint):
    checkpoint.config["rope_parameters"] = parameters
    checkpoint.write_config()
    assert inverse_frequencies(read_spec(checkpoint.folder).rotary, 4).shape == (2,)


def test_a_table_of_positions_that_no_file_holds_is_bounded(checkpoint):
    checkpoint.config |= {"max_position_embeddings": 2**24, "head_dim": 128}
    assert "max_position_embeddings" in refusal_of(checkpoint.write())
    checkpoint.config["max_position_embeddings"] = 2**20
    checkpoint.write_config()
    assert read_spec(checkpoint.folder).max_position_embeddings == 2**20


def test_an_odd_head_with_rotary_positions_is_refused(checkpoint):
    checkpoint.config["head_dim"] = 3
    assert "head size" in refusal_of(checkpoint.write())


def test_more_than_one_architecture_is_refused(checkpoint):
    checkpoint.config["architectures"] = ["LlamaForCausalLM"] * 2
    assert "architectures" in refusal_of(checkpoint.write())


def test_an_unknown_architecture_names_file_and_field(checkpoint):
    checkpoint.config["architectures"] = ["NewForCausalLM"]
    with pytest.raises(UnsupportedModelError, match=r"config\.json: architectures: .*NewForCausalLM"):
        load_model(checkpoint.write(), device="cpu")


def test_fields_know_what_is_null_and_what_is_not_there():
    fields = Fields({"a": None, "b": 0, "c": {"d": 1}}, "x")
    assert "a" not in fields and "b" in fields and "e" not in fields
    assert fields.fields("c").count("d") == 1
    with pytest.raises(ModelLoadError, match="x: c: e is missing"):
        fields.fields("c").text("e")
    with pytest.raises(ModelLoadError, match="x: a is null; expected a string; "):
        fields.text("a")
    assert "x: a is null; " in str(fields.fault("a", "5")) and "x: e is missing; " in str(fields.fault("e", "5"))


def test_architectures_of_null(checkpoint):
    checkpoint.config["architectures"] = None
    with pytest.raises(ModelLoadError, match=r"config\.json: architectures is null; expected a list of strings"):
        load_model(checkpoint.write(), device="cpu")


def test_a_file_that_grew_behind_its_data_is_refused(checkpoint):
    path = checkpoint.write() / "model.safetensors"
    with path.open("ab") as file:
        file.write(b"\0")
    assert "data_offsets end at" in refusal_of(checkpoint.folder)


def test_files_of_hostile_names_beside_the_checkpoint_do_not_matter(checkpoint):
    checkpoint.write()
    (checkpoint.folder / "\x1b\n.safetensors").write_bytes(b"")
    save_file({"x": torch.ones(1)}, checkpoint.folder / "other.safetensors")
    os.mkfifo(checkpoint.folder / "pipe")
    load_model(checkpoint.folder, device="cpu")
