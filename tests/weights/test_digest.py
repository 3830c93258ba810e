"""The digest of a checkpoint is that of the bytes that were loaded, of all files, or there is none."""

import os

import pytest

from batch_manager.weights.digest import checkpoint_digest, content_digest, identities


def folder_with(path, weights, config=b"{}"):
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def replace(file, content):
    file.with_suffix(".new").write_bytes(content)
    os.replace(file.with_suffix(".new"), file)


def test_copies_have_one_digest_and_others_have_others(tmp_path):
    one, copy = folder_with(tmp_path / "a", b"x" * 99), folder_with(tmp_path / "b", b"x" * 99)
    other, configured = folder_with(tmp_path / "c", b"y" * 99), folder_with(tmp_path / "d", b"x" * 99, b"[]")
    for digest in (checkpoint_digest, lambda path: content_digest(identities(path))):
        assert digest(one) == digest(copy) and len({digest(one), digest(other), digest(configured)}) == 3


def test_every_shard_counts(tmp_path):
    paths = []
    for name, last in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        for number, content in ((1, b"metadata"), (2, last)):
            (tmp_path / name / f"m-{number:05}-of-00002.gguf").write_bytes(content)
        paths.append(tmp_path / name / "m-00001-of-00002.gguf")
    for digest in (checkpoint_digest, lambda path: content_digest(identities(path))):
        assert len(set(map(digest, paths))) == 2


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_file_that_was_replaced_since_has_the_digest_of_what_was_loaded_or_none(tmp_path, is_kept):
    folder, kept = folder_with(tmp_path / "a", b"x" * 99), tmp_path / "kept"
    kept.mkdir()
    loaded = identities(folder)
    before = content_digest(loaded, kept) if is_kept else None
    replace(folder / "model.safetensors", b"y" * 99)
    if is_kept:
        assert content_digest(loaded, kept) == before != content_digest(identities(folder), kept)
    else:
        with pytest.raises(OSError, match=r"model\.safetensors was changed or replaced after it was loaded"):
            content_digest(loaded, kept)
    with pytest.raises(OSError, match="while they were loaded"):
        content_digest({}, kept)
