"""The kinds of entries of a checkpoint folder, and `Place`, which writes given entries to disk with few operations."""

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Bytes:
    """A regular file.

    lasts   many checkpoints contain this file: it is stored once beside the checkpoint folder, and hard-linked
    """

    data: bytes
    lasts: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link. A target with a slash, except for a leading "./", leads out of the folder or nowhere."""

    target: str


@dataclass(frozen=True, slots=True)
class Special:
    """An entry that is not a regular file: "pipe", "folder" or "socket"."""

    kind: str


Entry = Bytes | Link | Special


class Place:
    """A checkpoint folder on disk that `become` changes to given entries. It rewrites only what differs.

    A second folder beside it stores the files with `lasts`. The checkpoint folder has hard links to them.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._written = path, {}
        self._store, self._stored = path.with_name(f"{path.name}-store"), {}
        for folder in (self.path, self._store):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def become(self, files: Mapping[str, Entry]) -> None:
        for name in self._written.keys() - files.keys():
            self._remove(name)
        for name, entry in files.items():
            if self._written.get(name) != entry:
                self._write(name, entry)

    def _remove(self, name: str) -> None:
        path = f"{self.path}/{name}"
        if self._written.pop(name) == Special("folder"):
            os.rmdir(path)
        else:
            os.unlink(path)

    def _write(self, name: str, entry: Entry) -> None:
        if name in self._written:       # the file may be mapped, so it is replaced and not written into
            self._remove(name)
        path = f"{self.path}/{name}"
        if isinstance(entry, Bytes) and entry.lasts:
            if entry not in self._stored:
                self._stored[entry] = f"{self._store}/{len(self._stored)}"
                _write_file(self._stored[entry], entry.data)
            os.link(self._stored[entry], path)
        elif isinstance(entry, Bytes):
            _write_file(path, entry.data)
        elif isinstance(entry, Link):
            os.symlink(entry.target, path)
        elif entry.kind == "pipe":
            os.mkfifo(path)
        elif entry.kind == "folder":
            os.mkdir(path)
        else:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
        self._written[name] = entry

    def remove(self) -> None:
        shutil.rmtree(self.path)
        shutil.rmtree(self._store)


def _write_file(path: str, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(file, data)
    os.close(file)
