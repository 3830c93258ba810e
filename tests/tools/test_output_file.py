import os
import stat
from pathlib import Path

import pytest

from batch_manager.tools.output_file import OutputError, OutputFiles, output_file, why_no_folder, why_not_writable


def write(path, text="text", **options):
    with output_file(path, **options) as file:
        file.write(text)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write(path, "one\r\n")
    assert path.read_bytes() == b"one\r\n"
    with pytest.raises(KeyError), output_file(path) as file:
        file.write("half")
        file.flush()
        assert path.read_bytes() == b"one\r\n" and len(list(tmp_path.iterdir())) == 2
        raise KeyError
    assert path.read_bytes() == b"one\r\n" and list(tmp_path.iterdir()) == [path]


def test_all_files_of_a_command_appear_or_none(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    second.write_text("older")
    with pytest.raises(OSError, match="/dev/full cannot be written: No space left on device"), OutputFiles() as files:
        files.open(first).write("a" * 100_000)
        files.open(second, "wb").write(b"new")
        files.open(Path("/dev/full")).write("b")         # fails when it is closed, after the other two
    assert list(tmp_path.iterdir()) == [second] and second.read_text() == "older"
    with OutputFiles() as files:
        files.open(first).write("1")
        files.open(second, "wb").write(b"2")
        assert not first.exists() and second.read_text() == "older"
    assert (first.read_text(), second.read_text(), len(list(tmp_path.iterdir()))) == ("1", "2", 2)


def test_no_other_file_is_touched(tmp_path):
    """Writing a file leaves other files unchanged, even if their names look like names of temporary files."""
    others = [tmp_path / name for name in ("a.part", ".a.part", "a.tmp")]
    for other in others:
        other.write_text("mine")
    write(tmp_path / "a")
    with pytest.raises(KeyError), output_file(tmp_path / "a") as file:
        file.write("half")
        raise KeyError
    assert [other.read_text() for other in others] == ["mine"] * 3 and len(list(tmp_path.iterdir())) == 4


def test_errors_name_the_output(tmp_path):
    with pytest.raises(OutputError, match="No such file") as raised:
        write(tmp_path / "none" / "a.json")
    assert raised.value.filename == str(tmp_path / "none" / "a.json")
    with pytest.raises(OutputError, match="Is a directory") as raised:
        write(tmp_path)
    assert raised.value.filename == str(tmp_path)
    path = tmp_path / "a"
    with pytest.raises(OutputError, match="Is a directory") as raised, output_file(path) as file:
        file.write("text")
        path.mkdir()                                    # while the file is written
    assert raised.value.filename == str(path) and list(tmp_path.iterdir()) == [path]
    for size in (1, 100_000):                           # with 1, the close fails; with 100,000, a write fails
        with pytest.raises(OSError, match="/dev/full cannot be written: No space left on device"):
            write(Path("/dev/full"), "a" * size)


def test_two_outputs_of_one_name_and_the_source_are_refused(tmp_path):
    source, link = tmp_path / "source", tmp_path / "link"
    source.write_text("trace")
    link.symlink_to(source)
    for path in (source, link):
        with pytest.raises(ValueError, match="would overwrite the input"):
            write(path, source=source)
    with pytest.raises(ValueError, match="named for two outputs"), OutputFiles() as files:
        files.open(tmp_path / "a")
        files.open(tmp_path / "." / "a")
    assert source.read_text() == "trace" and sorted(tmp_path.iterdir()) == [link, source]


def test_what_a_link_points_at_is_written_and_permissions_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write(link)
    assert link.is_symlink() and target.read_text() == "text"
    target.chmod(0o640)
    write(link, "again")
    assert target.read_text() == "again" and stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_is_written_as_it_is():
    write(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_names_may_be_as_long_as_the_file_system_takes_them(tmp_path):
    for name in ("a" * 255, "\u6587" * 85):
        write(tmp_path / name)
        assert (tmp_path / name).read_text() == "text"


def test_why_something_cannot_be_written_is_known_before(tmp_path):
    assert not why_not_writable(tmp_path / "a.json") and not why_not_writable(tmp_path.parent / tmp_path.name / "a")
    assert "is a folder" in why_not_writable(tmp_path)
    assert "does not exist" in why_not_writable(tmp_path / "none" / "a.json")
    assert not why_no_folder(tmp_path) and not why_no_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert all("is not a folder" in why_no_folder(tmp_path / name) for name in ("file", "file/a"))
