"""The header of a valid GGUF file is read. An invalid header is refused before memory is allocated for its contents.

The error names the file and the fault.
"""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from batch_manager.errors import ModelLoadError
from batch_manager.weights.folder import gguf_file
from batch_manager.weights.gguf_header import (
    MAX_HEADER_BYTES,
    TENSOR_TYPES,
    GgufArray,
    read_gguf_array,
    read_gguf_header,
)

from .gguf_draft import ARRAY, BOOL, FLOAT32, TEXT, UINT32, Draft, Entry, Tensor, small, text


def read(tmp_path, draft):
    path = tmp_path / "model.gguf"
    path.write_bytes(draft if isinstance(draft, bytes) else draft.to_bytes())
    return read_gguf_header(gguf_file(path))


@pytest.mark.parametrize("version", (2, 3))
def test_metadata_and_tensors(tmp_path, version):
    draft = small()
    draft.version = version
    header = read(tmp_path, draft)
    assert header.version == version
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 1 and header.metadata["flag"] is True
    assert read_gguf_array(header, "tokenizer.ggml.tokens") == ["<s>", "a", "\N{GRINNING FACE}"]
    assert read_gguf_array(header, "tokenizer.ggml.scores").tolist() == [0.0, -1.0, -2.5]
    assert read_gguf_array(header, "flags").tolist() == [True, False]
    first = header.tensors["token_embd.weight"]
    assert (first.kind, first.shape, first.row_bytes) == ("F32", (3, 4), 16)
    data = (tmp_path / "model.gguf").read_bytes()
    assert np.frombuffer(data[first.begin : first.end], np.float32).tolist() == list(range(12))
    with pytest.raises(ModelLoadError, match="'flag' is True"):
        read_gguf_array(header, "flag")


def test_the_types_are_those_of_the_library():
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: sizes[number] for number in TENSOR_TYPES} == TENSOR_TYPES


def test_what_the_library_writes(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for number, add in enumerate((writer.add_uint8, writer.add_int8, writer.add_uint16, writer.add_int16,
                                  writer.add_uint32, writer.add_int32, writer.add_uint64, writer.add_int64)):
        add(f"n{number}", 100 + number)
    writer.add_float32("f", 1.5)
    writer.add_float64("d", 1.1)
    writer.add_bool("b", False)
    writer.add_string("s", "\N{GREEK SMALL LETTER ALPHA}")
    writer.add_array("a", [-1, 2, 3])
    writer.add_tensor("x", np.zeros((2, 3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(gguf_file(path))
    for key, found in gguf.GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            value = header.metadata[key]
            value = read_gguf_array(header, key).tolist() if isinstance(value, GgufArray) else value
            assert value == found.contents() and type(value) is type(found.contents()), key
    assert header.tensors["x"].shape == (2, 3, 4)


def changed(**fields) -> Draft:
    draft = small()
    for name, value in fields.items():
        setattr(draft, name, value)
    return draft


def with_entry(*entry, **raw) -> Draft:
    return small(extra=[Entry(*entry, **raw)])


def with_tensor(*tensor) -> Draft:
    draft = small()
    draft.tensors.append(Tensor(*tensor))
    return draft


HUGE = 2**64 - 1
WRONG = {
    "another magic": (changed(magic=b"GGML"), r"begins with b'GGML'; expected a GGUF file"),
    "nothing": (b"", r"its magic number ends at byte 4; the file has 0 bytes"),
    "version 1": (changed(version=1), r"has GGUF version 1; expected version 2 or 3"),
    "version 4": (changed(version=4), r"has GGUF version 4"),
    "big-endian": (changed(version=3 << 24), r"is a big-endian GGUF file; expected a little-endian one"),
    "many tensors": (changed(num_tensors=HUGE), r"tensor_count is 18,446,744,073,709,551,615; expected at most 65,536"),
    "many entries": (changed(num_entries=2**31), r"metadata_kv_count is 2,147,483,648"),
    "one entry more": (changed(num_entries=7), r"a tensor's name: the stated length is"),
    "one tensor more": (changed(num_tensors=3), r"a tensor's name"),
    "a long key": (with_entry("k" * 1025, UINT32, 1), r"a key has 1,025 bytes"),
    "an empty key": (with_entry("", UINT32, 1), r"a key has 0 bytes"),
    "a key that is no text": (with_entry(b"\xff", UINT32, 1), r"a key is b'\\xff'; expected UTF-8"),
    "a key twice": (with_entry("flag", BOOL, True), r"the key 'flag' occurs twice"),
    "a long text": (with_entry("t", TEXT, raw=struct.pack("<Q", HUGE)), r"'t': the stated length is 18,446"),
    "texts together": (with_entry("t", TEXT, "x" * (8 * 2**20 + 1)), r"up to key 't', the strings in the metadata"),
    "a text that is none": (with_entry("t", TEXT, b"\xc3("), r"'t' is b'\\xc3\('; expected UTF-8"),
    "an unknown value type": (with_entry("v", 13, raw=b""), r"'v' has value type 13"),
    "a flag of two": (with_entry("v", BOOL, raw=b"\2"), r"'v' is a flag with the value 2"),
    "flags of two": (with_entry("v", ARRAY, raw=struct.pack("<IQ", BOOL, 2) + b"\1\2"), r"'v' has a flag that is nei"),
    "an array of arrays": (with_entry("v", ARRAY, (ARRAY, [(UINT32, [1])])), r"'v' is an array of arrays"),
    "an array of nothing known": (with_entry("v", ARRAY, raw=struct.pack("<IQ", 77, 1)), r"'v' is an array of v"),
    "a long array": (with_entry("v", ARRAY, raw=struct.pack("<IQ", UINT32, HUGE)), r"'v': the stated length is"),
    "an array past the end": (with_entry("v", ARRAY, raw=struct.pack("<IQ", 12, 100)), r"'v' ends at byte"),
    "texts past the end": (with_entry("v", ARRAY, raw=struct.pack("<IQ", TEXT, 1) + struct.pack("<Q", HUGE)),
                           r"'v' ends at byte"),
    "no dimension": (with_tensor("x", [], 0, b""), r"'x' has 0 dimensions; expected 1 to 4"),
    "five dimensions": (with_tensor("x", [1] * 5, 0, bytes(4)), r"'x' has 5 dimensions"),
    "a dimension of nothing": (with_tensor("x", [4, 0], 0, b""), r"'x' has shape \[0, 4\]"),
    "an overflow": (with_tensor("x", [2**40, 2**40], 0, b""), r"'x' has shape"),
    "an unknown type": (with_tensor("x", [32], 99, bytes(32)), r"'x' has type 99; expected one of F32, F16"),
    "a removed type": (with_tensor("x", [32], 31, bytes(32)), r"'x' has type 31 \(Q4_0_4_4, which"),
    "half a block": (with_tensor("x", [48], 2, bytes(32)), r"'x' has rows of 48 elements in Q4_0; "
                                                                "expected a multiple of 32"),
    "an offset between": (with_tensor("x", [4], 0, bytes(16), 8), r"'x' has offset 8; expected a multiple of the"),
    "an overlap": (with_tensor("x", [4], 0, bytes(16), 0), r"not a complete GGUF file \(tensor 'token_embd.weight' b"),
    "an offset outside": (with_tensor("x", [4], 0, bytes(16), 2**40), r"'x' ends at byte 1,099,"),
    "an offset that overflows": (with_tensor("x", [4], 0, bytes(16), HUGE - 31), r"'x' ends at byte 18,446,"),
    "a tensor twice": (with_tensor("token_embd.weight", [4], 0, bytes(16)), r"the tensor 'token_embd.weight' occurs"),
    "a long name": (with_tensor("x" * 65, [4], 0, bytes(16)), r"a tensor's name has 65 bytes"),
    "an alignment of 24": (with_entry("general.alignment", UINT32, 24), r"general.alignment is 24; "
                                                                       "expected a power of two"),
    "an alignment of 0": (with_entry("general.alignment", UINT32, 0), r"general.alignment is 0"),
    "a broken alignment": (with_entry("general.alignment", FLOAT32, 32.0), r"general.alignment is 32.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_name(tmp_path, name):
    draft, message = WRONG[name]
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(tmp_path, draft)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    data = small().to_bytes()
    last = len(data) - 32 + 8                             # the last tensor has 8 bytes, the rest is padding
    for length in range(last):
        with pytest.raises(ModelLoadError):
            read(tmp_path, data[:length])
    read(tmp_path, data[:last])


def test_counts_take_no_memory_before_they_are_checked(tmp_path):
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:                         # sparse: it takes no disk space
        file.write(with_entry("v", ARRAY, raw=struct.pack("<IQ", UINT32, 2**30)).to_bytes())
        file.truncate(2**33)
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=f"a header of at most {MAX_HEADER_BYTES:,} bytes"):
        read_gguf_header(gguf_file(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


def test_a_vocabulary_stays_in_the_file(tmp_path):
    tokens = [f"token {number}" for number in range(50_000)]
    path = tmp_path / "model.gguf"
    path.write_bytes(small(extra=[Entry("v", ARRAY, (TEXT, tokens))]).to_bytes())
    tracemalloc.start()
    header = read_gguf_header(gguf_file(path))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**17
    assert read_gguf_array(header, "v") == tokens


def test_an_array_of_a_file_that_was_replaced(tmp_path):
    header = read(tmp_path, small())
    entries = small().entries
    entries[2].value = (TEXT, ["<s>", "a" * 1000, "b"])
    (tmp_path / "model.gguf").write_bytes(Draft(entries, []).to_bytes()[:-1001])
    with pytest.raises(ModelLoadError, match="has changed since its header was read|UTF-8"):
        read_gguf_array(header, "tokenizer.ggml.tokens")
    header = read(tmp_path, small(extra=[Entry("t", ARRAY, raw=struct.pack("<IQ", TEXT, 1) + text(b"\xff"))]))
    with pytest.raises(ModelLoadError, match=r"string 0 of key 't' is b'\\xff'; expected a UTF-8"):
        read_gguf_array(header, "t")


def test_links_and_things_that_are_no_file(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "blob").write_bytes(small().to_bytes())
    (tmp_path / "model.gguf").symlink_to(elsewhere / "blob")
    file = gguf_file(tmp_path / "model.gguf")
    assert (file.path, file.real_path) == (tmp_path / "model.gguf", elsewhere / "blob")
    assert read_gguf_header(file).metadata["general.architecture"] == "llama"
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelLoadError, match="folder.gguf is not a regular file"):
        gguf_file(tmp_path / "folder.gguf")
    with pytest.raises(ModelLoadError, match="the GGUF file '.*absent.gguf' cannot be opened"):
        gguf_file(tmp_path / "absent.gguf")
