"""A model loads from a snapshot folder in a Hugging Face cache, whose files are symbolic links to blobs.

A link that leads out of the cached repository is not followed.
"""

import os
from pathlib import Path

import pytest
import torch

from batch_manager.errors import ModelLoadError
from batch_manager.models import load_model
from batch_manager.weights import safetensors_source
from batch_manager.weights.folder import CheckpointFolder
from batch_manager.weights.safetensors_source import SafetensorsWeights


@pytest.fixture
def cached(checkpoint, tmp_path):
    """cached(shards=False): writes `checkpoint` as a cached repository, as huggingface_hub does. Returns its snapshot.

    The snapshot is a folder of links.
    """

    def make(repository="models--org--name", revision="0123abcd", shards=False, folder="hub"):
        checkpoint.write_shards() if shards else checkpoint.write()
        repository = tmp_path / folder / repository
        snapshot, blobs = repository / "snapshots" / revision, repository / "blobs"
        for made in (snapshot, blobs, repository / "refs"):
            made.mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        for number, file in enumerate(sorted(checkpoint.folder.iterdir())):
            file.rename(blobs / f"{number:040x}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
        return snapshot

    return make


def read(folder):
    return SafetensorsWeights(CheckpointFolder(folder), torch.device("cpu"), torch.float32)


def assert_is_read(folder, checkpoint):
    load_model(folder, device="cpu")
    weights = read(folder)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(weights.tensor(name, tensor.shape), tensor)


def blob_of(path):
    return path.parent / os.readlink(path)


@pytest.mark.parametrize("shards", [False, True])
def test_a_snapshot_is_as_good_as_a_folder_of_files(shards, cached, checkpoint):
    assert_is_read(cached(shards=shards), checkpoint)


@pytest.mark.parametrize("how", ["relative", "a link to the snapshot", "a link to the cache", "absolute links"])
def test_however_it_is_named_or_linked(how, cached, checkpoint, tmp_path, monkeypatch):
    snapshot = cached()
    if how == "relative":
        monkeypatch.chdir(snapshot.parent)
        snapshot = Path(snapshot.name)
    elif how == "a link to the snapshot":
        (tmp_path / "mine").symlink_to(snapshot)
        snapshot = tmp_path / "mine"
    elif how == "a link to the cache":
        (tmp_path / "disk").symlink_to(tmp_path / "hub")
        snapshot = tmp_path / "disk" / snapshot.relative_to(tmp_path / "hub")
    else:
        for path in snapshot.iterdir():
            blob = blob_of(path).resolve()
            path.unlink()
            path.symlink_to(blob)
    assert_is_read(snapshot, checkpoint)


def test_chains_of_links_that_end_in_the_repository_are_followed(cached, checkpoint):
    snapshot = cached()
    blob = blob_of(snapshot / "config.json")
    blob.rename(blob.with_name("ff"))
    blob.symlink_to("ff")
    (snapshot / "model.safetensors").rename(snapshot / "again")
    (snapshot / "model.safetensors").symlink_to("again")
    assert_is_read(snapshot, checkpoint)
    other = snapshot.with_name("4567")
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).symlink_to(snapshot / name)
    assert_is_read(other, checkpoint)


def test_a_file_beside_the_links_is_read_too(cached, checkpoint):
    snapshot = cached()
    blob = blob_of(snapshot / "config.json").resolve()
    (snapshot / "config.json").unlink()
    blob.rename(snapshot / "config.json")
    assert_is_read(snapshot, checkpoint)


def test_errors_name_the_file_of_the_snapshot(cached, checkpoint):
    checkpoint.config["hidden_size"] = "many"
    snapshot = cached()
    with pytest.raises(ModelLoadError) as refusal:
        load_model(snapshot, device="cpu")
    assert f"{snapshot.resolve()}/config.json: hidden_size" in str(refusal.value)
    blob_of(snapshot / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelLoadError) as refusal:
        read(snapshot)
    assert f"{snapshot.resolve()}/model.safetensors" in str(refusal.value) and "blobs" not in str(refusal.value)


def relink(path, target):
    path.unlink()
    path.symlink_to(target)


def straight_out(snapshot, outside):
    relink(snapshot / "config.json", outside)


def out_by_a_link_among_the_blobs(snapshot, outside):
    relink(blob_of(snapshot / "config.json"), outside)


def out_by_a_link_of_the_folder(snapshot, outside):
    (snapshot / "other").symlink_to(outside)
    relink(snapshot / "config.json", "other")


def out_by_blobs_that_are_a_link(snapshot, outside):
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(outside.parent / "blobs")
    blobs.symlink_to(outside.parent / "blobs")


def to_a_folder_of_the_blobs_that_is_a_link(snapshot, outside):
    (snapshot.parent.parent / "blobs" / "more").symlink_to(outside.parent)
    relink(snapshot / "config.json", f"../../blobs/more/{outside.name}")


def to_a_folder_among_the_blobs(snapshot, outside):
    more = snapshot.parent.parent / "blobs" / "more"
    more.mkdir()
    blob_of(snapshot / "config.json").rename(more / "0")
    relink(snapshot / "config.json", "../../blobs/more/0")


def back_from_the_blobs_by_dots(snapshot, outside):
    relink(snapshot / "config.json", f"../../blobs/../../../{outside.name}")


def to_another_file_of_the_repository(snapshot, outside):
    relink(snapshot / "config.json", "../../refs/main")


def to_another_repository(snapshot, outside):
    other = snapshot.parents[2] / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_bytes(outside.read_bytes())
    relink(snapshot / "config.json", "../../../models--org--other/blobs/0")


def to_another_snapshots_own_file(snapshot, outside):
    other = snapshot.with_name("4567")
    other.mkdir()
    (other / "config.json").write_bytes(outside.read_bytes())
    relink(snapshot / "config.json", "../4567/config.json")


@pytest.mark.parametrize("lead_out", [
    straight_out, out_by_a_link_among_the_blobs, out_by_a_link_of_the_folder, out_by_blobs_that_are_a_link,
    to_a_folder_of_the_blobs_that_is_a_link, to_a_folder_among_the_blobs, back_from_the_blobs_by_dots,
    to_another_file_of_the_repository, to_another_repository, to_another_snapshots_own_file])
def test_a_link_that_leads_elsewhere_is_refused(lead_out, cached, checkpoint, tmp_path):
    snapshot, outside = cached(), tmp_path / "outside.json"
    outside.write_bytes((snapshot / "config.json").read_bytes())
    lead_out(snapshot, outside)
    with pytest.raises(ModelLoadError, match=r"config.json.* leads out of the folder.*blobs of the same repository"):
        load_model(snapshot, device="cpu")


@pytest.mark.parametrize("repository, snapshots", [
    ("org--name", "snapshots"), ("Models--org--name", "snapshots"), ("models--org--name", "checkpoints")])
def test_a_folder_that_is_no_snapshot_has_no_blobs(repository, snapshots, cached):
    snapshot = cached(repository)
    folder = snapshot.parent.with_name(snapshots)
    snapshot.parent.rename(folder)
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        load_model(folder / snapshot.name, device="cpu")


def test_the_folder_above_or_below_a_snapshot_has_no_blobs(cached):
    snapshot = cached()
    below = snapshot / "below"
    below.mkdir()
    (below / "config.json").symlink_to(blob_of(snapshot / "config.json").resolve())
    (snapshot.parent / "config.json").symlink_to(blob_of(snapshot / "config.json").resolve())
    for folder in (below, snapshot.parent):
        with pytest.raises(ModelLoadError, match="leads out of the folder"):
            load_model(folder, device="cpu")


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing", "itself"])
def test_a_blob_that_is_no_file_is_refused(kind, cached):
    snapshot = cached()
    blob = blob_of(snapshot / "model.safetensors").resolve()
    blob.unlink()
    if kind == "pipe":
        os.mkfifo(blob)
    elif kind == "folder":
        blob.mkdir()
    elif kind == "itself":
        blob.symlink_to(blob.name)
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        load_model(snapshot, device="cpu")


def test_an_index_names_no_blob(cached, checkpoint):
    snapshot = cached(shards=True)
    index = blob_of(snapshot / "model.safetensors.index.json")
    blob = os.readlink(snapshot / "first.safetensors")
    index.write_text(index.read_text().replace("first.safetensors", blob))
    with pytest.raises(ModelLoadError, match="not a bare file name"):
        load_model(snapshot, device="cpu")


def test_a_link_that_is_pointed_elsewhere_after_it_was_checked_changes_nothing(cached, checkpoint, tmp_path,
                                                                               monkeypatch):
    snapshot, outside = cached(), tmp_path / "outside.safetensors"
    outside.write_bytes(b"another file")
    real = safetensors_source.read_header

    def read_header(file):
        tensors = real(file)
        relink(snapshot / "model.safetensors", outside)
        return tensors

    monkeypatch.setattr(safetensors_source, "read_header", read_header)
    weights = read(snapshot)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(weights.tensor(name, tensor.shape), tensor)
    with pytest.raises(ModelLoadError, match="leads out of the folder"):
        read(snapshot)
