"""C25: a bad checkpoint causes one ModelLoadError, which names file and field."""

import os
import struct
from pathlib import Path

import pytest
import torch

from batch_manager.errors import InsufficientMemoryError, ModelLoadError
from batch_manager.models import load_model
from batch_manager.weights.safetensors_source import SafetensorsWeights
from batch_manager.weights.source import DummyWeights


def refused(folder, *words, **options):
    with pytest.raises(ModelLoadError) as refusal:
        load_model(folder, device="cpu", dtype="float32", **options)
    for word in words:
        assert word in str(refusal.value), refusal.value


def a_missing_tensor(c):
    del c.tensors["model.layers.1.self_attn.k_proj.weight"]
    return c.write(), "model.layers.1.self_attn.k_proj.weight", "[4, 8]"


def a_missing_head(c):
    del c.tensors["lm_head.weight"]
    return c.write(), "lm_head.weight"


def a_wrong_shape(c):
    c.tensors["model.norm.weight"] = torch.ones(9)
    return c.write(), "model.safetensors", "model.norm.weight", "[9]", "[8]"


def a_transposed_matrix(c):
    c.tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(12, 8)
    return c.write(), "down_proj", "[12, 8]", "[8, 12]"


def an_integer_tensor(c):
    c.tensors["model.norm.weight"] = torch.ones(8, dtype=torch.int8)
    return c.write(), "model.norm.weight", "I8"


def an_eight_bit_float(c):
    c.tensors["model.norm.weight"] = torch.ones(8).to(torch.float8_e4m3fn)
    return c.write(), "model.norm.weight", "F8_E4M3"


def an_unexpected_tensor(c):
    c.tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)
    return c.write(), "model.safetensors", "weight_scale"


def another_layer_than_the_configuration_has(c):
    c.config["num_hidden_layers"] = 1
    return c.write(), "model.layers.1"


def a_tied_head_with_other_numbers(c):
    c.config["tie_word_embeddings"] = True
    return c.write(), "lm_head.weight", "tie_word_embeddings"


def no_weights(c):
    c.write_config()
    (c.folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return c.folder, "model.safetensors", "pickled"


def an_empty_file(c):
    c.write()
    (c.folder / "model.safetensors").write_bytes(b"")
    return c.folder, "model.safetensors"


def a_header_length_beyond_the_file(c):
    c.write()
    (c.folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    return c.folder, "model.safetensors"


def with_header(c, header, data=b"\0" * 64):
    c.write()
    (c.folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return c.folder, "model.safetensors"


def a_type_that_the_format_does_not_have(c):
    return (*with_header(c, b'{"a.b":{"dtype":"F99","shape":[16],"data_offsets":[0,64]}}'), "'a.b'", "'F99'",
            "expected 'F32', 'F16' or 'BF16'")


def an_offset_too_few(c):
    return (*with_header(c, b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0]}}'), "expected a list of 2 integers")


def one_position(c):
    c.config["max_position_embeddings"] = 1
    return c.write(), "config.json", "max_position_embeddings is 1; expected at least 2"


def a_header_that_is_no_object(c):
    return with_header(c, b"[1, 2]")


def a_header_nested_without_end(c):
    return with_header(c, b'{"a":' * 100_000)


def a_name_twice_in_one_header(c):
    entry = b'"model.norm.weight":{"dtype":"F32","shape":[8],"data_offsets":[%d,%d]}'
    return with_header(c, b"{" + entry % (0, 32) + b"," + entry % (32, 64) + b"}")


def overlapping_offsets(c):
    entry = b'"%s":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}'
    return with_header(c, b"{" + entry % b"a" + b"," + entry % b"b" + b"}")


def a_shape_whose_product_overflows(c):
    return with_header(c, b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,64]}}')


def a_negative_size(c):
    return with_header(c, b'{"a":{"dtype":"F32","shape":[-16],"data_offsets":[0,64]}}')


def a_shard_that_is_not_there(c):
    c.write_shards()
    (c.folder / "second.safetensors").unlink()
    return c.folder, "second.safetensors", "index.json"


def an_index_that_climbs_out_of_the_folder(c):
    return c.write_shards({"lm_head.weight": "../first.safetensors"}), "../first.safetensors", "index.json"


def an_index_with_an_absolute_path(c):
    return c.write_shards({"lm_head.weight": "/etc/passwd"}), "/etc/passwd", "index.json"


def an_index_with_a_windows_path(c):
    return c.write_shards({"lm_head.weight": "..\\first.safetensors"}), "index.json"


def an_index_with_a_null_byte(c):
    return c.write_shards({"lm_head.weight": "first.safetensors\0"}), "index.json"


def an_index_that_names_a_folder(c):
    (c.folder / "sub").mkdir()
    return c.write_shards({"lm_head.weight": "sub"}), "sub"


def an_index_that_names_a_number(c):
    return c.write_shards({"lm_head.weight": 7}), "index.json", "lm_head.weight"


def an_index_that_places_a_tensor_in_the_wrong_shard(c):
    return c.write_shards({"lm_head.weight": "second.safetensors"}), "lm_head.weight", "second.safetensors"


def an_index_that_misses_a_tensor(c):
    return c.write_shards({"lm_head.weight": "absent"}), "lm_head.weight", "does not list"


def an_index_that_promises_a_tensor(c):
    return c.write_shards({"model.more.weight": "second.safetensors"}), "model.more.weight", "does not contain it"


def an_index_without_a_map(c):
    c.write_shards()
    (c.folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    return c.folder, "index.json", "weight_map"


def a_tensor_in_two_shards(c):
    from safetensors.torch import save_file

    c.write_shards()
    members = sorted(c.tensors)[8:]
    save_file({name: c.tensors[name] for name in members}, c.folder / "second.safetensors")
    return c.folder, "again", members[0]


def a_link_out_of_the_folder(c):
    c.write()
    outside = c.folder.parent / "outside.safetensors"
    (c.folder / "model.safetensors").rename(outside)
    (c.folder / "model.safetensors").symlink_to(outside)
    return c.folder, "model.safetensors", "out of the folder"


def a_configuration_linked_from_outside(c):
    c.write()
    outside = c.folder.parent / "outside.json"
    (c.folder / "config.json").rename(outside)
    (c.folder / "config.json").symlink_to(outside)
    return c.folder, "config.json", "out of the folder"


def a_link_to_itself(c):
    c.write()
    (c.folder / "model.safetensors").unlink()
    (c.folder / "model.safetensors").symlink_to("model.safetensors")
    return c.folder, "model.safetensors"


def a_pipe_instead_of_a_file(c):
    c.write()
    (c.folder / "model.safetensors").unlink()
    os.mkfifo(c.folder / "model.safetensors")
    return c.folder, "model.safetensors", "regular file"


def no_configuration(c):
    c.write()
    (c.folder / "config.json").unlink()
    return c.folder, "config.json"


@pytest.mark.parametrize("damage", [
    a_missing_tensor, a_missing_head, a_wrong_shape, a_transposed_matrix, an_integer_tensor, an_eight_bit_float,
    an_unexpected_tensor, another_layer_than_the_configuration_has, a_tied_head_with_other_numbers, no_weights,
    an_empty_file, a_header_length_beyond_the_file, a_header_that_is_no_object, a_header_nested_without_end,
    a_type_that_the_format_does_not_have, an_offset_too_few, one_position,
    a_name_twice_in_one_header, overlapping_offsets, a_shape_whose_product_overflows, a_negative_size,
    a_shard_that_is_not_there, an_index_that_climbs_out_of_the_folder, an_index_with_an_absolute_path,
    an_index_with_a_windows_path, an_index_with_a_null_byte, an_index_that_names_a_folder,
    an_index_that_names_a_number, an_index_that_places_a_tensor_in_the_wrong_shard, an_index_that_misses_a_tensor,
    an_index_that_promises_a_tensor, an_index_without_a_map, a_tensor_in_two_shards, a_link_out_of_the_folder,
    a_configuration_linked_from_outside, a_link_to_itself, a_pipe_instead_of_a_file, no_configuration,
], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused(damage, checkpoint):
    refused(*damage(checkpoint))


@pytest.mark.parametrize("text", [
    b"", b"[]", b"null", b"3", b'"x"', b"{", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b"\xff\xfe{}",
    b'{"vocab_size": 11, "vocab_size": 12}', b'{"a":' * 200_000, b"[" * 200_000,
    b'{"a": ' + b"9" * 5000 + b"}", b" " * (5 * 1024 * 1024), b'{"architectures": ["LlamaForCausalLM"]}',
], ids=lambda text: text[:24].decode("latin-1") or "nothing")
def test_a_configuration_that_is_not_a_sane_json_object_is_refused(text, checkpoint):
    checkpoint.write()
    (checkpoint.folder / "config.json").write_bytes(text)
    refused(checkpoint.folder, "config.json")


def test_a_file_cut_off_anywhere_is_refused(checkpoint):
    path = checkpoint.write() / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    cuts = {*range(20), *range(20, header, 97), header - 1, header, header + 1,
            *range(header, len(data), 101), len(data) - 1}
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        refused(checkpoint.folder, "model.safetensors")


def test_a_file_with_a_byte_flipped_in_its_header_loads_or_is_refused(checkpoint):
    path = checkpoint.write() / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for place in range(0, header, 13):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :])
        try:
            load_model(checkpoint.folder, device="cpu", dtype="float32")
        except ModelLoadError as refusal:
            assert str(checkpoint.folder) in str(refusal)


@pytest.mark.parametrize("path", ["", "nowhere", "a\0b", 7, None, __file__])
def test_a_path_that_is_no_folder_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    refused(path if path else "empty")


def test_sizes_that_no_machine_holds_are_refused_before_anything_is_allocated(checkpoint):
    checkpoint.config |= {"vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**20,
                          "num_hidden_layers": 4096}
    checkpoint.write_config()
    refused(checkpoint.folder, "config.json", "weights", load_format="dummy")


def test_weights_that_do_not_fit_into_memory_are_an_error_of_their_own(checkpoint):
    checkpoint.config |= {"vocab_size": 2**24, "hidden_size": 2**19}
    checkpoint.write_config()
    with pytest.raises(InsufficientMemoryError, match="do not fit"):
        load_model(checkpoint.folder, device="cpu", dtype="float32", load_format="dummy")


class NoPath:
    def __fspath__(self):
        return 5

    def __repr__(self):
        raise KeyError


@pytest.mark.parametrize("path, words", [
    ("", "model_path is empty"), (b"", "model_path is empty"), (5, "model_path is of type int"),
    (NoPath(), "model_path is of type NoPath")])
def test_a_path_that_is_none_is_refused_wherever_the_process_stands(path, words, checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.write())
    load_model(".", device="cpu")
    refused(path, words)


@pytest.mark.parametrize("type_of_path", [os.fsencode, os.fsdecode, Path])
def test_a_folder_whose_path_is_not_utf_8_is_refused_for_what_it_is(type_of_path, checkpoint):
    folder = Path(os.fsdecode(os.fsencode(checkpoint.write()) + b"\xff"))
    checkpoint.folder.rename(folder)
    refused(type_of_path(folder), "UTF-8", "\\udcff", "rename the folder")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_larger_than_what_is_free_are_refused_before_any_is_allocated(load_format, checkpoint, monkeypatch):
    folder, options = checkpoint.write(), {"device": "cpu", "dtype": "bfloat16", "load_format": load_format}
    matrices = 2 * sum(tensor.numel() for tensor in checkpoint.tensors.values() if tensor.dim() == 2)
    load_model(folder, free_bytes=matrices, **options)
    for source in (SafetensorsWeights, DummyWeights):
        monkeypatch.setattr(source, "stacked", lambda *_: pytest.fail("asked for a tensor"))
    with pytest.raises(InsufficientMemoryError) as refusal:
        load_model(folder, free_bytes=matrices - 1, **options)
    assert all(part in str(refusal.value) for part in (
        str(folder), f"{matrices:,} bytes", f"{matrices - 1:,} bytes", "bfloat16", "smaller dtype"))


def test_what_is_not_there_or_not_needed_takes_no_memory(checkpoint):
    honest = 4 * sum(tensor.numel() for tensor in checkpoint.tensors.values())
    checkpoint.tensors["model.rotary_emb.inv_freq"] = torch.ones(10_000)         # no model reads it
    load_model(checkpoint.write(), device="cpu", dtype="float32", free_bytes=honest)
    checkpoint.config |= {"vocab_size": 2**20}                                   # no tensor has that many rows
    checkpoint.write()
    with pytest.raises(ModelLoadError, match="model.embed_tokens.weight"):
        load_model(checkpoint.folder, device="cpu", dtype="float32", free_bytes=honest + 40_000)


def test_a_message_holds_no_control_characters_of_the_file(checkpoint):
    folder = checkpoint.write_shards({"lm_head.weight": "\x1b[31m\nERROR all is well"})
    with pytest.raises(ModelLoadError) as refusal:
        load_model(folder, device="cpu")
    assert str(refusal.value).isprintable()


