"""Damages the content of a checkpoint before it is written: fields of config.json, entries of a header, or the index.

A checkpoint before it is written is a `Draft`. Its damaged files are still JSON files and safetensors files.
"""

import json
from collections.abc import Callable
from random import Random

from .config_rules import ACTIVATIONS, FOREIGN, ROTARY
from .honest import SINGLE, Draft, TensorFile

DEEP = "[" * 60 + "]" * 60
JUNK = ("null", "true", "false", "0", "1", "-1", "2", "3", "4", "6", "8", "16", "64", "1.0", "4.0", "0.5", "-0.0",
        "1e400", "-1e400", "1e300", "1e31", "1e-31", "1e-300", "NaN", "Infinity", "2147483648", "9223372036854775808",
        "18446744073709551616", "1048576", "1048577", "16777216", "16777217", "4096", "4097",
        "1" + "0" * 400, "9" * 5000, '""', '"4"', '"float32"', '"\\u001b[31m\\n"', '"\\ud800"', "[]", "{}", "[4]",
        "[4,[4]]", '{"a":1}', DEEP, f'"{"x" * 5000}"', '["LlamaForCausalLM"]', '["GPT2LMHeadModel"]',
        '["os.system"]', "[[]]")
OPTIONAL = ("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "torch_dtype",
            "dtype", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias",
            "mlp_bias", "n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
            "layer_norm_epsilon", "hidden_act", "activation_function", "rope_scaling", "rope_parameters",
            "original_max_position_embeddings", "model_type", "num_hidden_layers", "num_attention_heads",
            "hidden_size", "max_position_embeddings", *FOREIGN)
LIKELY = {"hidden_act": [*ACTIVATIONS, "tanh"], "activation_function": [*ACTIVATIONS, "tanh"],
          "dtype": ["float16", "torch.bfloat16", "auto", "torch.", "int8"], "torch_dtype": ["float32", "half"],
          "model_type": ["gpt2", "llama", "mistral", "qwen2", "qwen3", "Llama"], "num_hidden_layers": [1, 2],
          "num_attention_heads": [1, 2, 3], "hidden_size": [4, 6], "max_position_embeddings": [8, 16],
          "per_layer_config": [{}, {"0": {}}, {"0": {"num_key_value_heads": 2}}],
          "layer_types": [["full_attention"], ["sliding_attention"], ["full_attention"] * 2, ["chunked"], [1]],
          "rope_scaling": [known for known, _ in ROTARY], "rope_parameters": [known for known, _ in ROTARY],
          "auto_map": [{"AutoModelForCausalLM": "evil--modeling.X"}]}
SIZES = ("0", "1", "-1", "-0", "3", "4", "5", "4.0", '"4"', "null", "true", "[]", "1e3", "4294967296",
         "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "1" + "0" * 30)
DTYPES = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "I8", "U8", "BOOL", "I64", "C64", "f32",
          "", "F32\\u0000", "\\u001b[2J\\n", "float32", "F" * 3000)
NAMES = ("", "lm_head.weight", "transformer.wte.weight", "model.embed_tokens.weight", "__metadata__", "h.0.attn.bias",
         "transformer.h.0.attn.masked_bias", "model.rotary_emb.inv_freq",
         "model.layers.0.self_attn.rotary_emb.inv_freq",
         "model.layers.0.self_attn.q_proj.qweight", "../../etc/passwd", "\\u001b[31m\\nERROR", "\\ud800", "a" * 4000,
         "\\u0000", "model.norm.weight ")
TARGETS = ("../model.safetensors", "/etc/passwd", "..\\\\x.safetensors", "", ".", "..", "C:x.safetensors", "a/../x",
           "x.safetensors\\u0000", "/dev/zero", "/proc/self/mem", "~/x", "config.json", "model.safetensors.index.json",
           "absent.safetensors", "\\u001b[31m\\nall is well", "a" * 4000, "\\ud800", "model-00002-of-00002.safetensors",
           "model-00001-of-00002.safetensors", "file:///etc/passwd", "http://localhost/x", "x.safetensors%00")


def damage_config(draft: Draft, random: Random) -> None:
    names = [name for name, _ in draft.config]
    kind = random.random()
    if kind < 0.1:
        del draft.config[random.randrange(len(names))]
    elif kind < 0.15:
        draft.config.append(random.choice(draft.config))
    elif kind < 0.55:
        place = random.randrange(len(names))
        draft.config[place] = (names[place], _value(names[place], random))
    else:
        name = random.choice(OPTIONAL)
        draft.config[:] = [pair for pair in draft.config if pair[0] != name] + [(name, _value(name, random))]


def _value(name: str, random: Random) -> str:
    if name in LIKELY and random.random() < 0.7:
        return json.dumps(random.choice(LIKELY[name]))
    return random.choice(JUNK)


def damage_header(draft: Draft, random: Random) -> None:
    filled = sorted(name for name, file in draft.files.items() if file.entries)
    if filled:
        file = draft.files[random.choice(filled)]
        random.choice(HEADER_DAMAGE)(file, random)


def _dtype(file: TensorFile, random: Random) -> None:
    _fields(file, random)["dtype"] = f'"{random.choice(DTYPES)}"'


def _wrong_field(file: TensorFile, random: Random) -> None:
    field = random.choice(("dtype", "shape", "data_offsets"))
    _fields(file, random)[field] = random.choice((*SIZES, "{}", DEEP, '"F32"'))


def _field_missing(file: TensorFile, random: Random) -> None:
    fields = _fields(file, random)
    fields.pop(random.choice(sorted(fields)))


def _field_more(file: TensorFile, random: Random) -> None:
    _fields(file, random)[random.choice(("extra", "Dtype", "offset"))] = random.choice(JUNK)


def _shape(file: TensorFile, random: Random) -> None:
    fields = _fields(file, random)
    shape = _list(fields.get("shape"))
    kind = random.randrange(4)
    if kind == 0:
        shape.insert(random.randrange(len(shape) + 1), random.choice(SIZES))
    elif kind == 1:
        shape.reverse()
    elif shape:
        shape[random.randrange(len(shape))] = random.choice(SIZES)
        del shape[random.randrange(len(shape)) if kind == 2 else len(shape) :]
    fields["shape"] = f"[{','.join(shape)}]"


def _offsets(file: TensorFile, random: Random) -> None:
    fields = _fields(file, random)
    offsets = _list(fields.get("data_offsets")) or ["0", "0"]
    place = random.randrange(len(offsets))
    kind = random.randrange(4)
    if kind == 0:
        offsets[place] = random.choice(SIZES)
    elif kind == 1:
        offsets.reverse()
    elif kind == 2:
        offsets.append(random.choice(SIZES))
    elif offsets[place].isdigit():
        offsets[place] = str(int(offsets[place]) + random.choice((-4, -2, -1, 1, 2, 4, 2**32)))
    fields["data_offsets"] = f"[{','.join(offsets)}]"


def _places_exchanged(file: TensorFile, random: Random) -> None:
    one, other = _fields(file, random), _fields(file, random)
    one["data_offsets"], other["data_offsets"] = other.get("data_offsets", "0"), one.get("data_offsets", "0")


def _one_place_for_two(file: TensorFile, random: Random) -> None:
    _fields(file, random)["data_offsets"] = _fields(file, random).get("data_offsets", "[0,0]")


def _renamed(file: TensorFile, random: Random) -> None:
    place = random.randrange(len(file.entries))
    file.entries[place] = (f'"{random.choice(NAMES)}"', file.entries[place][1])


def _names_exchanged(file: TensorFile, random: Random) -> None:
    one, other = random.randrange(len(file.entries)), random.randrange(len(file.entries))
    (first, fields), (second, others) = file.entries[one], file.entries[other]
    file.entries[one], file.entries[other] = (second, fields), (first, others)


def _twice(file: TensorFile, random: Random) -> None:
    name, fields = random.choice(file.entries)
    file.entries.insert(random.randrange(len(file.entries) + 1), (name, dict(fields)))


def _taken_out(file: TensorFile, random: Random) -> None:
    """Remove the header entry of a random tensor, or the last tensor with its data.

    The file stays valid only if the last tensor is removed.
    """
    place = random.choice((-1, random.randrange(len(file.entries))))
    _, fields = file.entries.pop(place)
    begin = _list(fields.get("data_offsets"))[:1]
    if place == -1 and begin and begin[0].isdigit():
        file.data = file.data[: int(begin[0])]


def _one_more(file: TensorFile, random: Random) -> None:
    dtype, size = random.choice((("F32", 4), ("BF16", 2), ("BOOL", 1), ("F64", 8), ("F8_E5M2", 1)))
    shape, count = random.choice((("[2]", 2), ("[]", 1), ("[0]", 0), ("[2,3]", 6)))
    offsets = f"[{len(file.data)},{len(file.data) + size * count}]"
    file.entries.append((f'"{random.choice(NAMES)}"', {"dtype": f'"{dtype}"', "shape": shape, "data_offsets": offsets}))
    file.data += bytes(size * count)


def _metadata(file: TensorFile, random: Random) -> None:
    """Add the text field `__metadata__`. A value that is not text makes the file invalid."""
    value = random.choice(('"pt"', "1", "null", "{}", '"\\u001b"', '"x","format":"y"'))
    file.entries.insert(0, ('"__metadata__"', {"format": value}))


def _fields(file: TensorFile, random: Random) -> dict[str, str]:
    return random.choice(file.entries)[1] or {"dtype": '"F32"'}


def _list(literal: str | None) -> list[str]:
    inside = (literal or "").strip("[] ")
    return [item.strip() for item in inside.split(",")] if inside else []


HEADER_DAMAGE: tuple[Callable[[TensorFile, Random], None], ...] = (
    _dtype, _wrong_field, _field_missing, _field_more, _shape, _offsets, _places_exchanged, _one_place_for_two,
    _renamed, _names_exchanged, _twice, _taken_out, _one_more, _metadata)


def damage_index(draft: Draft, random: Random) -> None:
    """Damage the index of a checkpoint with shards.

    Half of the checkpoints with a single tensor file get a new file name and a valid index. The other half stay
    unchanged.
    """
    if SINGLE in draft.files:
        if random.random() < 0.5:
            draft.files["only.safetensors"] = draft.files.pop(SINGLE)
            draft.weight_map = [(json.loads(name), '"only.safetensors"')
                                for name, _ in draft.files["only.safetensors"].entries]
        return
    kind, place = random.random(), random.randrange(max(len(draft.weight_map), 1))
    if kind < 0.15 or not draft.weight_map or not draft.files:
        draft.weight_map.append((random.choice(NAMES[:9]), f'"{random.choice(TARGETS)}"'))
    elif kind < 0.3:
        del draft.weight_map[place]
    elif kind < 0.4:
        draft.weight_map.append(draft.weight_map[place])
    elif kind < 0.5:
        draft.files.pop(random.choice(sorted(draft.files)))
    elif kind < 0.6:
        one, other = (random.choice(sorted(draft.files)) for _ in range(2))
        draft.files[one] = draft.files[other]
    else:
        value = f'"{random.choice(TARGETS)}"' if random.random() < 0.8 else random.choice(JUNK)
        draft.weight_map[place] = (draft.weight_map[place][0], value)
