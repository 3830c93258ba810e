"""Makes the files of the checkpoints that the fuzzer tries. `case(key)` returns them. These are the forms of a key:

17                    a random damaged checkpoint, from seed 17
cut-17                a valid checkpoint with one truncated file: number 17 of all possible truncations, from 0 on
large-FILE-TEXT       megabytes of JSON in place of the FILE "config", "header" or "index"; TEXT is in LARGE_TEXTS
honest-FAMILY         a valid checkpoint of the model family
gguf-17               a random damaged GGUF file, from seed 17
adapter-17            a random damaged adapter folder of peft, from seed 17
"""

from bisect import bisect_right
from functools import cache
from itertools import accumulate
from random import Random

from . import adapter_cases
from .damage_bytes import LARGE_TEXTS, damage_bytes, stand_in
from .damage_structure import damage_config, damage_header, damage_index
from .entries import Bytes, Entry
from .gguf_cases import FILE, damaged
from .honest import CONFIG, FAMILIES, INDEX, SINGLE, Draft, TensorFile, honest

MEGABYTES = 4.2
DTYPES = ("F32", "F16", "BF16")
CUT, GGUF, ADAPTER = "cut-", "gguf-", "adapter-"


STRUCTURAL = {"config": damage_config, "header": damage_header, "index": damage_index}


@cache
def honest_files(*base) -> dict[str, Entry]:
    """The cached files of the checkpoint honest(*base)."""
    return {name: Bytes(data, lasts=True) for name, data in honest(*base).to_files().items()}


def case(key: str) -> dict[str, Entry]:
    kind, _, rest = key.partition("-")
    if kind == "gguf":
        return {FILE: Bytes(damaged(int(rest)))}
    if kind == "adapter":
        return adapter_cases.damaged(int(rest))[1]
    if kind == "honest":
        return honest_files(rest, "BF16", False, True, True)
    if kind == "large":
        return _large(*rest.split("-", 1))
    return _cut(int(rest)) if kind == "cut" else _damaged(int(key))


def _damaged(seed: int) -> dict[str, Entry]:
    """Return the files of a random checkpoint. Most have one kind of damage, some two or three, and few have none."""
    random = Random(seed)
    base = (random.choice(list(FAMILIES)), random.choice(DTYPES), random.random() < 0.4, random.random() < 0.5,
            random.random() < 0.5)
    damages = random.choices((0, 1, 2, 3), (2, 75, 18, 5))[0]
    kinds = random.choices(("config", "header", "index", "bytes", "place"), (22, 33, 8, 35, 2), k=damages)
    structural = [kind for kind in kinds if kind in STRUCTURAL]
    draft = _copy(honest(*base)) if structural else None
    for kind in structural:
        STRUCTURAL[kind](draft, random)
    files: dict[str, Entry] = dict(honest_files(*base))
    if draft is not None:
        rendered = draft.to_files()
        files = {name: files[name] if name in files and files[name].data == data else Bytes(data)
                 for name, data in rendered.items()}
    for _ in range(kinds.count("bytes")):
        name = random.choice(sorted(files))
        files[name] = Bytes(damage_bytes(files[name].data, random))
    for _ in range(kinds.count("place")):
        stand_in(files, random)
    return files


def _copy(draft: Draft) -> Draft:
    files = {name: TensorFile([(entry, dict(fields)) for entry, fields in file.entries], file.data)
             for name, file in draft.files.items()}
    return Draft(draft.family, list(draft.config), files, list(draft.weight_map))


def _cut_bases() -> list[tuple]:
    return [(family, "F16", sharded, False, True) for family in FAMILIES for sharded in (False, True)]


@cache
def _cuttable() -> tuple[list[tuple[dict[str, Entry], str]], list[int]]:
    """Return the list of files to truncate, and the number of the first truncation of each file.

    A file is (all files of its checkpoint, its name). The list of numbers ends with the number of all truncations.

    Each family has one checkpoint with a single tensor file and one with shards. A file is cut at each byte of its JSON
    or header, including the header's length, and once inside the data.
    """
    places, counts = [], []
    for base in _cut_bases():
        files = honest_files(*base)
        for name, entry in files.items():
            places.append((files, name))
            is_json = name.endswith(".json")
            counts.append(len(entry.data) if is_json else 10 + int.from_bytes(entry.data[:8], "little"))
    return places, list(accumulate(counts, initial=0))


def num_cuts() -> int:
    return _cuttable()[1][-1]


def cuts_of(family: str) -> range:
    """Return the numbers of the truncations of one family's checkpoints, which are consecutive."""
    places, starts = _cuttable()
    files = [honest_files(*base) for base in _cut_bases() if base[0] == family]
    numbers = [number for number, (of, _) in enumerate(places) if any(of is one for one in files)]
    return range(starts[numbers[0]], starts[numbers[-1] + 1])


def _cut(number: int) -> dict[str, Entry]:
    places, starts = _cuttable()
    which = bisect_right(starts, number) - 1
    files, name = places[which]
    return {**files, name: Bytes(files[name].data[: number - starts[which]])}


def _large(file: str, text: str) -> dict[str, Entry]:
    data = LARGE_TEXTS[text](int(MEGABYTES * 2**20))
    if file == "header":
        data = len(data).to_bytes(8, "little") + data
    name = {"config": CONFIG, "header": SINGLE, "index": INDEX}[file]
    return {**honest_files("llama", "F32", file == "index", False, False), name: Bytes(data)}
