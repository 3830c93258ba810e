"""Damages the files of a checkpoint after they were written: changes bytes, or replaces a file by another entry."""

import io
import pickle
import zipfile
from collections.abc import Callable
from random import Random

from .entries import Bytes, Entry, Link, Special

LENGTHS = (0, 1, 7, 8, 100_000_001, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
PIECES = (b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n",
          b"-", b"e9", b"0", b"9" * 20, b"NaN", b"null", b'"a":1,', b"\\ud800", b"/**/", b"\x1b[2J", b" " * 1000)
MEGABYTES = 4.2


class _Evil:
    def __reduce__(self):
        return print, ("this must never be seen",)


def _zip() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Evil()))
    return content.getvalue()


FOREIGN_FILES = (pickle.dumps(_Evil()), _zip(), b"", b"\x93NUMPY\x01\x00", b"GGUF\x03\0\0\0", b"\x1f\x8b\x08\0",
                 b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"import os\nos.abort()\n",
                 b"<html></html>", b"{}", b"[]", b"null", b"\2\0\0\0\0\0\0\0{}", bytes(64))
STAND_INS = (Special("pipe"), Special("folder"), Special("socket"), Link("/dev/zero"), Link("/etc/hostname"),
             Link("absent"), Link("../other/config.json"), Link("/proc/self/fd/0"))


def damage_bytes(data: bytes, random: Random) -> bytes:
    """Return the data with one kind of damage, which is more often near the beginning than elsewhere."""
    kind = random.random()
    if kind < 0.02:
        return random.choice(FOREIGN_FILES)
    if kind < 0.0203:
        return large(random, data)
    if not data:
        return random.choice(PIECES)
    place = random.randrange(min(len(data), random.choice((8, 64, 1000, len(data)))))
    if kind < 0.5:
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            changed[place] ^= 1 << random.randrange(8) if random.random() < 0.7 else random.randrange(1, 256)
            place = random.randrange(len(data))
        return bytes(changed)
    if kind < 0.65:
        return data[:place]
    if kind < 0.75:
        return data[:place] + random.choice(PIECES) + data[place:]
    if kind < 0.85:
        return data[:place] + data[place + random.choice((1, 2, 8, 100)) :]
    if kind < 0.93:
        length = random.choice((*LENGTHS, len(data), len(data) - 8, len(data) - 7))
        return (length if random.random() < 0.7 else int.from_bytes(data[:8], "little") + random.choice(
            (-8, -1, 1, 8))).to_bytes(9, "little", signed=True)[:8] + data[8:]
    if kind < 0.97:
        return data + random.choice(PIECES)
    return _header_longer(data, random.choice(PIECES), random)


def _header_longer(data: bytes, piece: bytes, random: Random) -> bytes:
    """Insert a piece into the header and adjust the header's length."""
    length = int.from_bytes(data[:8], "little")
    place = random.randrange(8, 9 + min(length, max(len(data) - 8, 0)))
    return ((length + len(piece)) % 2**64).to_bytes(8, "little") + data[8:place] + piece + data[place:]


def large(random: Random, data: bytes) -> bytes:
    """Return megabytes of random JSON as a file like `data`: a JSON file, or a safetensors file with this header."""
    text = random.choice(list(LARGE_TEXTS.values()))(int(random.choice((1, MEGABYTES)) * 2**20))
    return text if data[:1] == b"{" else len(text).to_bytes(8, "little") + text


def _list_of(unit: bytes) -> Callable[[int], bytes]:
    return lambda size: b'{"a":[' + unit * (size // len(unit)) + b"1]}"


# Texts that cost much memory or time for their size. Each function makes a text of about `size` bytes.
LARGE_TEXTS: dict[str, Callable[[int], bytes]] = {
    "lists": _list_of(b"[],"), "objects": _list_of(b"{},"), "texts": _list_of(b'"",'), "numbers": _list_of(b"1e1,"),
    "digits": _list_of(b"9" * 4000 + b","), "nested": lambda size: b'{"a":' * (size // 5),
    "keys": lambda size: b"{" + b",".join(b'"%x":0' % number for number in range(size // 9)) + b"}",
    "a-key-twice": lambda size: b"{" + b",".join(b'"%x":0' % number for number in range(150_000)) + b',"0":1}',
    "the-last-key-twice": lambda size: (b"{" + b",".join(b'"%x":0' % number for number in range(150_000))
                                        + b',"249ef":1}'),
    "a-long-shape": lambda size: (b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b"999999999999," * 150_000
                                  + b"1]}}"),
    "wide-letters": lambda size: b'{"a":"' + "\N{GRINNING FACE}".encode() * (size // 4) + b'"}',
    "escapes": lambda size: b'{"a":"' + b"\\u1234" * (size // 6) + b'"}', "spaces": lambda size: b" " * size,
    "as-deep-as-the-stack": lambda size: (b'{"num_hidden_layers":' + b"[" * (900 + size % 97) + b"]" * (900 + size % 97)
                                          + b"}"),
}


def stand_in(files: dict[str, Entry], random: Random) -> None:
    """Replace a random file by another entry, or remove it.

    The entry may be a link, a foreign file, a copy of another file of the checkpoint, a folder, a pipe or a socket. The
    checkpoint may stay valid only if the entry is a link to the moved file, or an equal file.
    """
    name = random.choice(sorted(files))
    kind, found = random.random(), files[name]
    if kind < 0.15 and isinstance(found, Bytes):
        files["elsewhere"] = found
        files[name] = Link(random.choice(("elsewhere", name, "elsewhere", "./elsewhere")))
    elif kind < 0.3:
        files[name] = Bytes(random.choice(FOREIGN_FILES))
    elif kind < 0.4:
        del files[name]
    elif kind < 0.5:
        files[name] = files[random.choice(sorted(files))]
    else:
        files[name] = random.choice(STAND_INS)
