"""C12, the prompt cache on disk: whatever happens to its files, a block that is read is the block that was saved."""

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from batch_manager import ConfigError, KvCacheConfig, StoredBlock
from batch_manager.kv_events import block_hash
from batch_manager.stores import directory
from batch_manager.stores.directory import EMPTIED, SECONDS_OF_A_TEMPORARY_FILE, DirectoryStore

SIZE, NUM_BYTES = 4, 96


def chain(count, root=b"r" * 32, extra=None):
    blocks = []
    for number in range(count):
        tokens = tuple(range(number, number + SIZE))
        root, parent = block_hash(b"", root, tokens, extra, size=32), root
        blocks.append(StoredBlock(root, parent, tokens, extra))
    return blocks


def content(block):
    return block.key * (NUM_BYTES // 32)


def load(store, blocks):
    """Return the contents that the store gives, and check that each is right."""
    buffers = [bytearray(NUM_BYTES) for _ in blocks]
    num_right = store.load(blocks, [memoryview(buffer) for buffer in buffers])
    for block, buffer in list(zip(blocks, buffers))[:num_right]:
        assert bytes(buffer) == content(block)
    return num_right


def save(store, blocks):
    for block in blocks:
        store.save(block, memoryview(content(block)))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def opened(folder, limit=1 << 30, **options):
    return DirectoryStore(str(folder), limit, **options)


def files(folder):
    return sorted(folder.glob("??/*.kv"))


def test_another_process_finds_what_was_saved(folder):
    blocks = [*chain(5), *chain(2, extra=(7, 2**64 - 1, 0, 1))]
    store = opened(folder)
    save(store, blocks)
    save(store, blocks)
    other = opened(folder)
    assert other.count(blocks) == load(other, blocks) == 7
    assert other.figures() == store.figures() and other.figures()["Disk Cache Blocks"] == len(files(folder)) == 7
    assert other.figures()["Disk Cache Bytes"] == sum(file.stat().st_size for file in files(folder))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}
    assert other.count(chain(3, root=b"s" * 32)) == 0
    later = chain(9)[5:]
    save(other, later)
    store._scan()
    assert store.count(later) == 4



def flipped(data, bit):
    return data[:bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1:]


MUTATIONS = {
    "empty": lambda data, draw, other: b"",
    "torn": lambda data, draw, other: data[:draw.randrange(len(data))],
    "longer": lambda data, draw, other: data + bytes(draw.randrange(1, 99)),
    "a bit": lambda data, draw, other: flipped(data, draw.randrange(8 * len(data))),
    "zeros": lambda data, draw, other: data[:(at := draw.randrange(len(data)))] + bytes(len(data) - at),
    "another block": lambda data, draw, other: other,
    "noise": lambda data, draw, other: draw.randbytes(len(data)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_damaged_file_is_a_miss_and_goes(folder, name):
    draw, block, other = Random(name), chain(1)[0], chain(1, root=b"o" * 32)[0]
    store = opened(folder)
    save(store, [block, other])
    path = store._file(block.key)
    good, foreign = path.read_bytes(), store._file(other.key).read_bytes()
    for number in range(60):
        path.write_bytes(MUTATIONS[name](good, draw, foreign))
        fresh = opened(folder, read_only=number % 2 == 1)
        if path.read_bytes() == good:
            continue
        assert load(fresh, [block]) == 0 and fresh.num_damaged == 1
        assert path.exists() == (number % 2 == 1)
    path.write_bytes(good)
    assert load(opened(folder), [block]) == 1


@pytest.mark.parametrize("make", [
    lambda path: None, lambda path: path.mkdir(), lambda path: (path.mkdir(), (path / "file").write_text("")),
    lambda path: path.symlink_to("/etc/passwd"), lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to("missing"), lambda path: os.mkfifo(path)])
def test_what_is_no_file_is_no_block_and_makes_way_for_one(folder, make):
    blocks = chain(3)
    store = opened(folder)
    save(store, blocks)
    path = store._file(blocks[1].key)
    path.unlink()
    make(path)
    for number, other in enumerate((store, opened(folder))):
        assert load(other, blocks) == (3 if number else 1)
        save(other, blocks)
        assert load(other, blocks) == 3


def test_all_damaged_blocks_of_a_load_are_found_at_once(folder):
    blocks = chain(8)
    store = opened(folder)
    save(store, blocks)
    for block in blocks[2:]:
        store._file(block.key).write_bytes(b"damaged")
    assert load(store, blocks) == 2 and store.num_damaged == 6
    save(store, blocks)
    assert load(store, blocks) == 8


def test_threads_do_not_take_the_same_room(folder, monkeypatch):
    first, *others = chain(4)
    save(opened(folder), [first])
    size = files(folder)[0].stat().st_size
    store = opened(folder, 2 * size)
    write = store._write

    def meanwhile(*arguments):
        monkeypatch.setattr(store, "_write", write)
        save(store, others[1:])                                    # what another thread does now
        write(*arguments)
    monkeypatch.setattr(store, "_write", meanwhile)
    save(store, others[:1])
    assert sum(file.stat().st_size for file in files(folder)) <= 2 * size


class Killed(BaseException):
    pass


class System:
    """The functions of `os`, of which call number `dies_at` kills the process or fails, and all later ones kill it."""

    def __init__(self, dies_at, error):
        self._left, self._error, self.is_dead = dies_at, error, False

    def __getattr__(self, name):
        value = getattr(os, name)
        if name not in ("open", "write", "mkdir", "rename", "unlink", "utime", "stat", "fstat", "scandir", "makedirs"):
            return value

        def call(*arguments, **options):
            self._left -= 1
            if self._left == 0 or self.is_dead:
                if self._error is not None and not self.is_dead:
                    raise self._error
                self.is_dead = True
                if name == "write":                # a part of it
                    value(arguments[0], bytes(arguments[1])[:7])
                raise Killed
            return value(*arguments, **options)
        return call


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device"), OSError(5, "Input/output error"),
                                   PermissionError(13, "Permission denied")], ids=str)
def test_a_process_that_is_killed_or_refused_at_any_call_leaves_no_wrong_block(tmp_path, monkeypatch, error):
    blocks, first = chain(3), chain(1, root=b"f" * 32)
    calls = 0
    for dies_at in range(1, 400):
        folder = tmp_path / str(dies_at)
        save(opened(folder), first)
        size = files(folder)[0].stat().st_size
        system = System(dies_at, error)
        with monkeypatch.context() as patch:
            patch.setattr(directory, "os", system)
            try:
                store = opened(folder, int(3.4 * size))            # the fourth block makes others go
                for block in [*blocks, *first, *chain(2, root=dies_at.to_bytes(32, "big"))]:
                    try:
                        save(store, [block])
                        load(store, [block])
                    except OSError:
                        assert error is not None
            except ConfigError:
                assert error is not None
            except Killed:
                pass
        fresh = opened(folder, int(3.4 * size))
        for block in [*blocks, *first]:
            if load(fresh, [block]) == 0:
                assert fresh.count([block]) == 0
        assert fresh.num_damaged == 0, "a file with its final name is whole"
        assert sum(file.stat().st_size for file in files(folder)) <= 3.4 * size + size
        calls += 1
        if system._left > 0:
            break
    assert calls > 20 and not system.is_dead


def test_temporary_files_go_by_their_age(folder):
    (folder / "tmp-1-0").write_bytes(b"x")
    (folder / "tmp-2" / "below").mkdir(parents=True)               # had the name of a block
    opened(folder)
    assert (folder / "tmp-1-0").exists(), "another process may be writing it"
    opened(folder, timestamp=lambda: os.stat(folder).st_mtime + SECONDS_OF_A_TEMPORARY_FILE + 5, read_only=True)
    assert (folder / "tmp-1-0").exists()
    opened(folder, timestamp=lambda: os.stat(folder).st_mtime + SECONDS_OF_A_TEMPORARY_FILE + 5)
    assert not list(folder.glob("tmp-*"))


def test_the_directory_is_bounded_for_two_processes_and_what_was_used_last_stays(folder):
    now, draw = [1e9], Random(1)
    (one,), size = chain(1), 0
    store = opened(folder, timestamp=lambda: now[0])
    save(store, [one])
    size = files(folder)[0].stat().st_size
    limit = 20 * size
    both = [opened(folder, limit, timestamp=lambda: now[0]) for _ in range(2)]
    reader = opened(folder, limit, timestamp=lambda: now[0], read_only=True)
    os.utime(files(folder)[0], (now[0], now[0]))
    for number in range(200):
        now[0] += draw.choice([60.0, 5000.0, -3000.0])             # clocks jump
        process = both[draw.randrange(2)]
        block = chain(1, root=number.to_bytes(32, "big"))[0]
        save(process, [block])
        assert sum(file.stat().st_size for file in files(folder)) <= limit
        if number % 10 == 0:
            reader.refresh()
            assert load(process, [block]) == load(reader, [block]) == 1
    assert len(files(folder)) > 20 * EMPTIED - 4
    both[0]._scan()
    assert both[0].figures()["Disk Cache Blocks"] == len(files(folder))
    for read_only in (True, False):                                # a lower limit holds without a save
        before = len(files(folder))
        opened(folder, limit // 4, read_only=read_only).refresh()
        assert (len(files(folder)) == before) is read_only
    assert 0 < sum(file.stat().st_size for file in files(folder)) <= limit // 4
    tiny = opened(folder, 10)
    save(tiny, chain(1, root=b"t" * 32))
    assert tiny.figures()["Disk Cache Blocks"] == 0, "one block is larger than the limit"


def test_a_directory_that_is_only_read_does_not_change(folder):
    save(opened(folder), chain(3))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(folder)}
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o500)
    try:
        store = opened(folder, 0, read_only=True, timestamp=lambda: 5e9)
        assert load(store, chain(3)) == 3
        save(store, chain(6))
        assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(folder)} == before
    finally:
        for path in [folder, *folder.iterdir()]:
            path.chmod(0o700)


def test_a_directory_that_vanishes_costs_its_blocks_alone(folder):
    store = opened(folder)
    save(store, chain(3))
    shutil.rmtree(folder)
    assert load(store, chain(3)) == 0
    for call in (store.refresh, lambda: save(store, chain(1))):      # what the engine contains
        with pytest.raises(FileNotFoundError):
            call()
    opened(folder)
    store.refresh()                                                # it is there again
    save(store, chain(3))
    assert load(store, chain(3)) == 3


def test_a_directory_of_others_is_refused(folder, monkeypatch):
    owner = os.stat(folder).st_uid
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        for read_only in (False, True)[:2 if owner else 1]:          # one that is only read may belong to root
            with pytest.raises(ConfigError, match=f"of user {owner} with mode 700; expected a directory of your own"):
                opened(folder, read_only=read_only)
        if not owner:
            assert load(opened(folder, read_only=True), chain(1)) == 0
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 770; expected a directory of your own"):
        opened(folder)
    (folder / "file").write_text("")
    for path, text in ((folder / "file", "it cannot be used|it is no directory"),
                       (folder / "file" / "below", "it cannot be used: ")):
        with pytest.raises(ConfigError, match=text):
            opened(path)
    with pytest.raises(ConfigError, match="it cannot be used: No such .*; pass a directory that exists, or"):
        opened(folder / "missing", read_only=True)


@pytest.mark.parametrize("value", ["", b"x", 5, True, "a\0b", "\ud800"])
def test_a_path_that_is_none_is_named(value):
    with pytest.raises(ConfigError, match="KvCacheConfig.disk_cache_path is .*; expected the path of a directory"):
        KvCacheConfig(enable_block_reuse=True, disk_cache_path=value, disk_cache_size=5)


def test_a_relative_path_stays_the_same_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = KvCacheConfig(enable_block_reuse=True, disk_cache_path=Path("kept"), disk_cache_size=5)
    monkeypatch.chdir("/")
    assert replace(config).disk_cache_path == str(tmp_path / "kept")
