"""A store of blocks in a directory that any number of processes, also of different models, may share.

One file a block, found by its key. A file is the block's name, its content, and a digest of both. Every byte of the
name is compared before the content is used, so a wrong file is a miss, never a wrong block. A file is written under a
temporary name and renamed; nothing waits for the disk: after a crash, the digest finds what is torn.
"""

import errno
import os
import re
import stat
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from threading import Lock

from ..contained_log import log
from ..errors import ConfigError, counted
from .interface import KEY_BYTES, StoredBlock

MAGIC = b"batch_manager KV block, version 1\n"
_SIZES = struct.Struct("<QQQ")                 # tokens, extra ids, bytes of the content
DIGEST_BYTES = 32
_is_hex = re.compile("[0-9a-f]+").fullmatch
SUFFIX, TEMPORARY, LOCK_NAME = ".kv", "tmp-", "lock"
SECONDS_BETWEEN_TOUCHES = SECONDS_OF_A_TEMPORARY_FILE = 3600
SECONDS_UNTIL_SETTLED = 2.0                    # a change soon after another may leave the time of a folder as it was
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)    # a link, a folder, a device
EMPTIED = 0.9                                  # share of the limit to which files go when it is reached
UNSEEN, UNSEEN_OF_THE_REST = 1 / 64, 1 / 8     # shares that are written without a look at the whole directory


class DirectoryStore:
    """The stores.interface.BlockStore in a directory. Any thread may call any method.

    path        the directory, which is made if it is missing. It must belong to the user, and no other may write to
                it; one that is only read may belong to root
    limit       bytes of all blocks, of all models; those that were not used for the longest time go first
    read_only   change nothing, not even times
    timestamp   () -> seconds since 1970

    Raises ConfigError.
    """

    def __init__(self, path: str, limit: int, *, read_only: bool = False,
                 timestamp: Callable[[], float] = time.time) -> None:
        self._path, self._limit, self._read_only, self._timestamp = Path(path), limit, read_only, timestamp
        self._files: dict[bytes, tuple[int, float]] = {}     # key -> bytes, time of the last use
        self._times: dict[str, tuple[int, float]] = {}       # folder -> time of its change, and when that was seen
        self._total = 0                                      # bytes of the files, also of those that are being written
        self._unseen = 0                                     # bytes that were saved since the last look at all files
        self._lock = Lock()
        self.num_damaged = self.num_deleted = 0
        try:
            if not read_only:
                os.makedirs(path, mode=0o700, exist_ok=True)
            self._check_owner()
            self._scan()
            self._remove_temporary()
        except OSError as error:
            raise ConfigError(f"disk_cache_path is {path!r}", f"it cannot be used: {error.strerror}",
                              "pass a directory that exists, or leave disk_cache_read_only out" if read_only else
                              "pass a directory on a local disk that you may write to, or disk_cache_read_only=True"
                              ) from error
        log.info("the disk cache %s has %s of %s bytes", path, counted(len(self._files), "block"), f"{self._total:,}")

    def _check_owner(self) -> None:
        found = os.stat(self._path)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"disk_cache_path is {str(self._path)!r}", "it is no directory", "pass a directory")
        owners = (os.geteuid(), 0) if self._read_only else (os.geteuid(),)
        if found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"disk_cache_path is {str(self._path)!r}, of user {found.st_uid} with mode "
                              f"{stat.S_IMODE(found.st_mode):o}", "expected a directory of your own that no other user "
                              "can write to", "pass another directory, or chmod go-w")

    # The protocol.

    def count(self, blocks: Sequence[StoredBlock]) -> int:
        found = 0
        for block in blocks:
            if block.key not in self._files:
                break
            found += 1
        return found

    def load(self, blocks: Sequence[StoredBlock], buffers: Sequence[memoryview]) -> int:
        num_right = len(blocks)
        for number, (block, buffer) in enumerate(zip(blocks, buffers, strict=True)):
            try:
                is_right = self._read(block, buffer)
            except FileNotFoundError:          # another process deleted it
                self._forget(block.key)
                return min(number, num_right)
            if not is_right:                   # the later ones are looked at too, so that all are saved again together
                self.num_damaged += 1
                self._delete(block.key)
                num_right = min(number, num_right)
        return num_right

    def save(self, block: StoredBlock, content: memoryview) -> None:
        if self._read_only or block.key in self._files:
            return
        name = _name_of(block, len(content))
        size = len(name) + len(content) + DIGEST_BYTES
        with self._lock:
            self._total += size                                  # so that two threads do not take the same room
        try:
            if self._has_room(size):
                self._write(block.key, name, content)
                self._note(block.key, size, self._timestamp())
                self._unseen += size
        finally:
            with self._lock:
                self._total -= size

    def _write(self, key: bytes, name: bytes, content: memoryview) -> None:
        temporary = self._temporary()
        try:
            with open(temporary, "xb", buffering=0, opener=_private) as file:
                for part in (name, content, _digest(name, content)):
                    _write(file.fileno(), part)
            target = self._file(key)
            with suppress(FileExistsError):
                os.mkdir(target.parent, 0o700)
            os.rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            self._forget(key)
            raise

    def figures(self) -> Mapping[str, int]:
        return {"Disk Cache Bytes": self._total, "Disk Cache Blocks": len(self._files),
                "Disk Damaged Files": self.num_damaged}

    def close(self) -> None:
        pass

    def refresh(self) -> None:
        """Look for files of other processes. Remove the oldest ones above the limit, which may be a new one."""
        self._scan()
        if self._total > self._limit and not self._read_only:
            self._shrink()

    # One file.

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._path / name[:2] / (name[2:] + SUFFIX)

    def _read(self, block: StoredBlock, buffer: memoryview) -> bool:
        """Whether the file of a block is right. Its content is then in the buffer."""
        try:
            opened = open(self._file(block.key), "rb", buffering=0, opener=_existing)
        except OSError as error:
            if error.errno in NO_FILE:
                return False
            raise
        name = _name_of(block, len(buffer))
        with opened as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size != len(name) + len(buffer) + DIGEST_BYTES:
                return False
            if file.read(len(name)) != name:
                return False
            filled = 0
            while filled < len(buffer):
                num_bytes = file.readinto(buffer[filled:])
                if not num_bytes:
                    return False
                filled += num_bytes
            if file.read(DIGEST_BYTES + 1) != _digest(name, buffer):
                return False
            now = self._timestamp()
            if not self._read_only and abs(now - found.st_mtime) > SECONDS_BETWEEN_TOUCHES:
                with suppress(OSError):
                    os.utime(file.fileno(), (now, now))
                self._note(block.key, found.st_size, now)
        return True

    def _note(self, key: bytes, size: int, used_at: float) -> None:
        with self._lock:
            self._total += size - self._files.get(key, (0, 0.0))[0]
            self._files[key] = size, used_at

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._total -= self._files.pop(key, (0, 0.0))[0]

    def _delete(self, key: bytes) -> None:
        self._forget(key)
        if not self._read_only:
            path = self._file(key)
            with suppress(OSError):
                try:
                    os.unlink(path)
                except (IsADirectoryError, PermissionError):     # a folder has the name of a block
                    os.rename(path, self._temporary())
                self.num_deleted += 1

    def _temporary(self) -> Path:
        return self._path / f"{TEMPORARY}{os.urandom(8).hex()}"

    # All files.

    def _scan(self) -> None:
        """Read the folders that have changed since they were read."""
        seen = set()
        with os.scandir(self._path) as entries:
            folders = [entry for entry in entries if len(entry.name) == 2 and _is_hex(entry.name)]
        for folder in folders:
            if not folder.is_dir(follow_symlinks=False):
                continue
            seen.add(folder.name)
            now, changed_at = time.monotonic(), folder.stat(follow_symlinks=False).st_mtime_ns
            known, seen_at = self._times.get(folder.name, (None, 0.0))
            if changed_at != known:
                self._times[folder.name] = changed_at, now
            elif now - seen_at > SECONDS_UNTIL_SETTLED:
                continue
            self._take_in(folder.name, dict(_listed(folder)))
        with self._lock:
            named = {f"{first:02x}" for first in {key[0] for key in self._files}}
        for name in (named | self._times.keys()) - seen:
            self._times.pop(name, None)            # another thread may look as well
            self._take_in(name, {})

    def _take_in(self, folder: str, found: dict[bytes, tuple[int, float]]) -> None:
        first = bytes.fromhex(folder)
        with self._lock:
            for key in [key for key in self._files if key[:1] == first and key not in found]:
                self._total -= self._files.pop(key)[0]
            for key, (size, used_at) in found.items():
                self._total += size - self._files.get(key, (0, 0.0))[0]
                self._files[key] = size, used_at

    def _has_room(self, size: int) -> bool:
        """Make room for the files that are in `_total`. False: another process does that, or the limit is too small.

        Other processes may have saved files since the last look. Without one, none saves more than the share UNSEEN of
        the limit, or UNSEEN_OF_THE_REST of what is left of it.
        """
        left = self._limit - self._total
        if self._unseen + size <= min(UNSEEN * self._limit, UNSEEN_OF_THE_REST * left):
            return True
        self._unseen = 0
        self._scan()
        return self._total <= self._limit or self._shrink()

    def _shrink(self) -> bool:
        """Remove the files that were not used for the longest time. False as for `_has_room`."""
        with open(self._path / LOCK_NAME, "ab", opener=_private) as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return False
            with self._lock:
                oldest_first = sorted(self._files, key=lambda key: self._files[key][1])
            for key in oldest_first:
                if self._total <= EMPTIED * self._limit:
                    break
                self._delete(key)
        return self._total <= self._limit

    def _remove_temporary(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        if self._read_only:
            return
        now = self._timestamp()
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY):
                    with suppress(OSError):
                        if abs(now - entry.stat(follow_symlinks=False).st_mtime) > SECONDS_OF_A_TEMPORARY_FILE:
                            if entry.is_dir(follow_symlinks=False):        # it had the name of a block
                                rmtree(entry.path)
                            else:
                                os.unlink(entry.path)


def _listed(folder: "os.DirEntry[str]") -> Iterator[tuple[bytes, tuple[int, float]]]:
    with suppress(FileNotFoundError), os.scandir(folder.path) as entries:
        for entry in entries:
            name = entry.name.removesuffix(SUFFIX)
            if len(name) == 2 * KEY_BYTES - 2 and name != entry.name and _is_hex(name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield bytes.fromhex(folder.name + name), (found.st_size, found.st_mtime)


def _name_of(block: StoredBlock, num_bytes: int) -> bytes:
    """Return the beginning of a block's file, which a reader expects byte by byte."""
    extra = () if block.extra_ids is None else block.extra_ids
    sizes = _SIZES.pack(len(block.token_ids), 0 if block.extra_ids is None else 1 + len(extra), num_bytes)
    ids = array("q", block.token_ids).tobytes() + ",".join(map(str, extra)).encode()
    return MAGIC + block.key + block.parent + sizes + ids


def _digest(name: bytes, content: memoryview) -> bytes:
    state = blake2b(name, digest_size=DIGEST_BYTES)
    state.update(content)
    return state.digest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _existing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view):]
