import os
import stat
from pathlib import Path

import pytest

from batch_manager.tools.whole_file import why_no_folder, why_not_writable, write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, lambda file: file.write("one"))
    assert path.read_text() == "one"

    def fails(file):
        file.write("half")
        raise KeyError("no")
    with pytest.raises(KeyError):
        write_whole(path, fails)
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_what_a_link_points_at_is_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, lambda file: file.write("text"))
    assert link.is_symlink() and target.read_text() == "text"


def test_a_device_is_written_as_it_is_and_named_when_it_is_full():
    write_whole(Path("/dev/null"), lambda file: file.write("text"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_whole(Path("/dev/full"), lambda file: file.write("text"))


def test_why_something_cannot_be_written_is_known_before(tmp_path):
    assert not why_not_writable(tmp_path / "a.json") and not why_not_writable(tmp_path.parent / tmp_path.name / "a")
    assert "is a folder" in why_not_writable(tmp_path)
    assert "does not exist" in why_not_writable(tmp_path / "none" / "a.json")
    assert not why_no_folder(tmp_path) and not why_no_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert all("is no folder" in why_no_folder(tmp_path / name) for name in ("file", "file/a"))
