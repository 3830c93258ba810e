"""Makes damaged GGUF files from seeds.

The files are made from valid files with tiny models of four architectures, in various GGUF types. Most files have one
kind of damage, some two or three, and few have none. Damage is done to the `Draft` of a file before it is written, or
to the bytes.
"""

import copy
import pickle
import struct
from collections.abc import Callable
from functools import cache
from random import Random

import gguf

from tests.weights.gguf_draft import ARRAY, BOOL, FLOAT32, INT32, TEXT, UINT32, UINT64, Draft, Entry, Tensor

from .damage_bytes import damage_bytes

FILE = "model.gguf"
HIDDEN, INNER, VOCAB, LAYERS, HEADS, KEYS, SIZE = 32, 64, 7, 2, 4, 2, 8
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "IQ4_NL")
K_KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
K_HIDDEN = 256                         # inputs of a block of these types
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
# Of valid files. In files of K types, matrices with other inputs are Q8_0. A gpt2 cannot have heads of another size.
ARCHITECTURE_AND_KIND = [(architecture, kind) for architecture in ARCHITECTURES
                         for kind in (KINDS if architecture == "gpt2" else KINDS + K_KINDS)]
ODD_NUMBERS = (0, 1, 2, 3, 5, 7, 31, 33, 63, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
HUGE_NUMBERS = (*ODD_NUMBERS, 2**32, 2**40, 2**41, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)
STRANGE_KEYS = ("surprise", "expert_count", "attention.sliding_window", "rope.scaling.type", "rope.scaling.factor",
                "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size",
                "attention.causal", "rope.freq_base", "nextn_predict_layers", "tensor_data_layout")
STRANGE_NAMES = ("", "x", "blk.0.attn_q", "blk.0.attn_q.weight", "blk.1.ffn_up.bias", "blk.2.attn_q.weight",
                 "blk.00.attn_q.weight", "blk.-1.attn_q.weight", "output.weight", "rope_freqs.weight", "a" * 64,
                 "a" * 65, "blk.99999999.attn_q.weight", b"\xff", "token_embd.weight\0", "../x", "\x1b[2J")


def shapes_of(architecture: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, in the order of torch: rows first."""
    layer = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    if architecture == "gpt2":
        layer |= {"attn_qkv.weight": (3 * hidden, hidden), "attn_output.weight": (hidden, hidden),
                  "ffn_up.weight": (INNER, hidden), "ffn_down.weight": (hidden, INNER), "attn_norm.bias": (hidden,),
                  "ffn_norm.bias": (hidden,), "attn_qkv.bias": (3 * hidden,), "attn_output.bias": (hidden,),
                  "ffn_up.bias": (INNER,), "ffn_down.bias": (hidden,)}
    else:
        rows = {"q": HEADS * SIZE, "k": KEYS * SIZE, "v": KEYS * SIZE}
        layer |= {f"attn_{part}.weight": (count, hidden) for part, count in rows.items()}
        layer |= {"attn_output.weight": (hidden, HEADS * SIZE), "ffn_gate.weight": (INNER, hidden),
                  "ffn_up.weight": (INNER, hidden), "ffn_down.weight": (hidden, INNER)}
        if architecture == "qwen2":
            layer |= {f"attn_{part}.bias": (count,) for part, count in rows.items()}
        if architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (SIZE,), "attn_k_norm.weight": (SIZE,)}
    shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    if architecture == "gpt2":
        shapes |= {"output_norm.bias": (hidden,), "position_embd.weight": (16, hidden)}
    return shapes | {f"blk.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}


@cache
def honest(architecture: str, kind: str, untied: bool) -> Draft:
    """Return the cached draft of a valid file, which callers must not change.

    kind     GGUF type of the matrices, see ARCHITECTURE_AND_KIND
    untied   whether the file has a separate tensor for the head
    """
    random, hidden = Random(f"{architecture} {kind} {untied}"), K_HIDDEN if kind in K_KINDS else HIDDEN
    norm = "layer_norm_epsilon" if architecture == "gpt2" else "layer_norm_rms_epsilon"
    numbers = {"block_count": LAYERS, "context_length": 16, "embedding_length": hidden, "feed_forward_length": INNER,
               "attention.head_count": HEADS}
    if architecture != "gpt2":
        numbers |= {"attention.head_count_kv": KEYS}
    if kind in K_KINDS:
        numbers |= {"attention.key_length": SIZE, "attention.value_length": SIZE, "rope.dimension_count": SIZE}
    entries = [Entry("general.architecture", TEXT, architecture), Entry("general.quantization_version", UINT32, 2),
               *[Entry(f"{architecture}.{key}", UINT32, value) for key, value in numbers.items()],
               Entry(f"{architecture}.attention.{norm}", FLOAT32, 0.5),
               Entry("tokenizer.ggml.tokens", ARRAY, (TEXT, ["<s>", "</s>", *"abcde"])),
               Entry("tokenizer.ggml.token_type", ARRAY, (INT32, [3, 3, 1, 1, 1, 1, 1])),
               Entry("tokenizer.ggml.add_bos_token", BOOL, True), Entry("tokenizer.ggml.eos_token_id", UINT32, 1)]
    tensors = []
    head = {"output.weight": (VOCAB, hidden)} if untied else {}
    for name, shape in (shapes_of(architecture, hidden) | head).items():
        is_whole = kind not in K_KINDS or shape[-1] % K_HIDDEN == 0
        number = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind if is_whole else "Q8_0"]
        block, size = gguf.GGML_QUANT_SIZES[number]
        count = size * shape[-1] // block
        for rows in shape[:-1]:
            count *= rows
        bits = bytearray(random.randbytes(count))
        bits[1::2] = bytes(byte & 0x3F for byte in bits[1::2])
        tensors.append(Tensor(name, list(shape[::-1]), number.value, bytes(bits)))
    return Draft(entries, tensors)


@cache
def _pickled(architecture: str, kind: str, untied: bool) -> bytes:
    return pickle.dumps(honest(architecture, kind, untied))


def damaged(seed: int) -> bytes:
    random = Random(seed)
    draft = pickle.loads(_pickled(*random.choice(ARCHITECTURE_AND_KIND), random.random() < 0.3))
    damages = random.choices((0, 1, 2, 3), (3, 75, 17, 5))[0]
    in_bytes = 0
    for _ in range(damages):
        if random.random() < 0.4:
            in_bytes += 1
        else:
            random.choice(DAMAGES)(draft, random)
    data = draft.to_bytes()
    for _ in range(in_bytes):
        data = damage_bytes(data, random)
    return data


def _entry(draft: Draft, random: Random) -> None:
    """Change the value, type or key of an entry, or repeat or remove the entry."""
    place = random.randrange(len(draft.entries))
    entry, kind = draft.entries[place], random.random()
    if kind < 0.15:
        del draft.entries[place]
    elif kind < 0.25:
        draft.entries.insert(random.randrange(len(draft.entries) + 1), entry)
    elif kind < 0.4:
        entry.kind = random.choice((*range(14), 255, 2**31))
        entry.raw = random.randbytes(random.choice((1, 2, 4, 8, 12, 16)))
    elif kind < 0.5:
        entry.raw = random.randbytes(random.choice((0, 1, 4, 8, 40)))
    elif kind < 0.6:
        entry.key = random.choice((b"", b"\xff\xfe", "x" * 2000, "general.alignment", f"{entry.key}x", "\x1b[31m"))
    elif entry.kind == UINT32:
        entry.value = random.choice(ODD_NUMBERS)
    elif entry.kind == FLOAT32:
        entry.value = random.choice((0.0, -1.0, float("nan"), float("inf"), 1e-38, 1e30, 1e38))
    elif entry.kind == TEXT:
        entry.value = random.choice(("", "llama", "qwen2", "gpt2", "gemma", "mamba", "clip", b"\xc3(", "x" * 5000))
    else:
        entry.raw = struct.pack("<IQ", random.choice((TEXT, ARRAY, UINT32, BOOL, 99)), random.choice(HUGE_NUMBERS))


def _new_entry(draft: Draft, random: Random) -> None:
    architecture = draft.entries[0].value
    key = random.choice((f"{architecture}.{random.choice(STRANGE_KEYS)}", "general.alignment", "general.type",
                         "split.count", "split.no", "general.quantization_version", "tokenizer.ggml.eot_token_id",
                         "somebody.says"))
    kind = random.choice((UINT32, UINT32, UINT64, FLOAT32, BOOL, TEXT, ARRAY))
    value = {UINT32: random.choice((8, 32, *ODD_NUMBERS)), UINT64: random.choice(HUGE_NUMBERS),
             FLOAT32: random.choice((0.0, 1.0, 10000.0, float("nan"))), BOOL: random.random() < 0.5,
             TEXT: random.choice(("model", "none", "linear", "yarn", "x")),
             ARRAY: (UINT32, [random.choice(ODD_NUMBERS) for _ in range(random.randrange(4))])}[kind]
    draft.entries.insert(random.randrange(1, len(draft.entries) + 1), Entry(key, kind, value))


def _tensor(draft: Draft, random: Random) -> None:
    place = random.randrange(len(draft.tensors))
    tensor, kind = draft.tensors[place], random.random()
    if kind < 0.15:
        del draft.tensors[place]
    elif kind < 0.25:
        draft.tensors.insert(place, copy.deepcopy(tensor))
    elif kind < 0.4:
        tensor.name = random.choice(STRANGE_NAMES)
    elif kind < 0.55:
        tensor.kind = random.choice((*range(45), 255, 2**31))
    elif kind < 0.75:
        tensor.dims = random.choice((tensor.dims[::-1], [], [*tensor.dims, 1], [1] * 5, [0, *tensor.dims[1:]],
                                     [random.choice(HUGE_NUMBERS), *tensor.dims[1:]],
                                     [*tensor.dims[:-1], random.choice(HUGE_NUMBERS)], [HIDDEN, 2 * VOCAB]))
    elif kind < 0.9:
        tensor.offset = random.choice((*HUGE_NUMBERS, 32, 64, 1024, 4096))
    else:
        tensor.data = tensor.data[: random.randrange(len(tensor.data))]


def _counts(draft: Draft, random: Random) -> None:
    count = random.choice((*HUGE_NUMBERS, len(draft.tensors) - 1, len(draft.tensors) + 1, len(draft.entries) - 1))
    if random.random() < 0.5:
        draft.num_tensors = count
    else:
        draft.num_entries = count


def _front(draft: Draft, random: Random) -> None:
    if random.random() < 0.5:
        draft.version = random.choice((0, 1, 2, 3, 4, 2**24 * 3, 2**24 * 2, 2**32 - 1))
    else:
        draft.magic = random.choice((b"GGUF", b"FUGG", b"GGML", b"gguf", b"\0\0\0\0"))


def _alignment(draft: Draft, random: Random) -> None:
    """Set general.alignment in the metadata. Align the data to it in some files only."""
    said = random.choice((1, 2, 8, 16, 64, 128, 0, 24, 2**20, 2**21, 2**31))
    draft.entries.append(Entry("general.alignment", UINT32, said))
    if 1 <= said <= 128 and random.random() < 0.6:
        draft.alignment = said


def _tail(draft: Draft, random: Random) -> None:
    draft.tail = random.randbytes(random.choice((1, 32, 1000)))


def _order(draft: Draft, random: Random) -> None:
    random.shuffle(draft.tensors)


DAMAGES: tuple[Callable[[Draft, Random], None], ...] = (
    *(_entry,) * 3, *(_new_entry,) * 2, *(_tensor,) * 3, _counts, _front, _alignment, _tail, _order)
