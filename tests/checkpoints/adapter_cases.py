"""Makes damaged adapter folders of peft, for three small models. `damaged(seed)` returns the files of one."""

import json
from functools import cache
from random import Random

from .damage_bytes import damage_bytes, stand_in
from .damage_structure import JUNK, damage_header
from .entries import Bytes, Entry
from .honest import Draft, TensorFile, tensor_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

_DECODER = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_DECODER},
    "phi3": {"architectures": ["Phi3ForCausalLM"], **_DECODER, "pad_token_id": None},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 5, "n_embd": 4, "n_layer": 2, "n_head": 2,
             "n_positions": 16},
}
# Model -> the projections of a layer: path -> (module ids, inputs, outputs of each module).
_LLAMA = {"self_attn.q_proj": ((1,), 4, (4,)), "self_attn.k_proj": ((2,), 4, (2,)), "self_attn.v_proj": ((3,), 4, (2,)),
          "self_attn.o_proj": ((4,), 4, (4,)), "mlp.gate_proj": ((5,), 4, (6,)), "mlp.up_proj": ((7,), 4, (6,)),
          "mlp.down_proj": ((6,), 6, (4,))}
_PHI3 = {"self_attn.qkv_proj": ((0,), 4, (8,)), "self_attn.o_proj": ((4,), 4, (4,)),
         "mlp.gate_up_proj": ((5, 7), 4, (6, 6)), "mlp.down_proj": ((6,), 6, (4,))}
_GPT2 = {"attn.c_attn": ((0,), 4, (12,)), "attn.c_proj": ((4,), 4, (4,)), "mlp.c_fc": ((5,), 4, (16,)),
         "mlp.c_proj": ((6,), 16, (4,))}
PROJECTIONS = {name: {f"{layers}.{layer}.{path}": (layer, *rest) for layer in range(2) for path, rest in paths.items()}
               for name, layers, paths in (("llama", "model.layers", _LLAMA), ("phi3", "model.layers", _PHI3),
                                           ("gpt2", "transformer.h", _GPT2))}

# As peft 0.21.2 writes them.
FIELDS = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "a/b", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 2,
    "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"], "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None}
LIKELY = {
    "r": [1, 2, 3, 1024, 1025], "lora_alpha": [1, 16, 0.5, -3, 0, 1e29, 3e30], "use_rslora": [True],
    "rank_pattern": [{"q_proj": 2}, {"q_proj": 3}, {"^q_proj": 3}, {"(q|k)_proj": 2},
                     {"^model.layers.0.mlp.up_proj": 2}],
    "alpha_pattern": [{"o_proj": 3}, {".*": 3}, {"attn.c_attn": 0.25, "c_attn": 1}, {"proj": 2},
                      {"1.mlp.down_proj": -1}],
    "init_lora_weights": ["gaussian", "pissa", "olora", False, "eva", "pissa_niter_4"], "bias": ["all", "lora_only"],
    "target_modules": [["q_proj", "k_proj"], "all-linear", ["mlp.c_proj", "o_proj"], [], "(a*)*",
                       ["model.layers.1.self_attn.v_proj", "q_proj"]],
    "exclude_modules": [["v_proj"], ["model.layers.0.mlp.up_proj", "proj"], []],
    "layers_to_transform": [0, 1, [1], [0, 1], []],
    "peft_type": ["IA3", "lora", "ADALORA"], "use_dora": [True], "modules_to_save": [["lm_head"], []]}
PATTERNS = ("rank_pattern", "alpha_pattern")
NAMES = ("lora_magnitude_vector", "lora_embedding_A", "lora_B.bias", "lora_A.default.weight", "lora_C.weight",
         "lora_A.weight", "lora_B.weight")


@cache
def honest(model: str, dtype: str, rank: int) -> Draft:
    """Return the cached draft of a valid adapter, which callers must not change."""
    source = Random(f"{model} {dtype} {rank}")
    modules = source.sample(sorted(PROJECTIONS[model]), source.randint(1, 4))
    tensors = []
    for module in modules:
        _, _, inputs, outputs = PROJECTIONS[model][module]
        tensors += [(f"{PREFIX}{module}.lora_A.weight", dtype, (rank, inputs)),
                    (f"{PREFIX}{module}.lora_B.weight", dtype, (sum(outputs), rank))]
    fields = {**FIELDS, "r": rank, "target_modules": sorted({module.rsplit(".", 1)[1] for module in modules})}
    return Draft(model, [(name, json.dumps(value)) for name, value in fields.items()],
                 {TENSORS: tensor_file(tensors, source)})


def written(draft: Draft) -> dict[str, bytes]:
    text = ",".join(f'"{name}":{value}' for name, value in draft.config)
    return {TENSORS: draft.files[TENSORS].to_bytes(), CONFIG: f"{{{text}}}".encode()}


def damaged(seed: int) -> tuple[str, dict[str, Entry]]:
    """Return the model and the files of a random adapter. Most have one kind of damage, few have none."""
    random = Random(seed)
    base = honest(random.choice(sorted(MODELS)), random.choice(("F32", "F16", "BF16")), random.choice((1, 2, 2, 3)))
    file = base.files[TENSORS]
    draft = Draft(base.family, list(base.config), {
        TENSORS: TensorFile([(name, dict(fields)) for name, fields in file.entries], file.data)})
    kinds = random.choices(("config", "names", "header", "bytes", "place"), (40, 10, 20, 28, 2),
                           k=random.choices((0, 1, 2, 3), (4, 72, 18, 6))[0])
    for kind in kinds:
        if kind == "config":
            _damage_config(draft, random)
        elif kind == "names":
            _damage_name(draft.files[TENSORS], random)
        elif kind == "header":
            damage_header(draft, random)
    files: dict[str, Entry] = {name: Bytes(data) for name, data in written(draft).items()}
    for _ in range(kinds.count("bytes")):
        name = random.choice(sorted(files))
        files[name] = Bytes(damage_bytes(files[name].data, random))
    for _ in range(kinds.count("place")):
        stand_in(files, random)
    return base.family, files


def _damage_config(draft: Draft, random: Random) -> None:
    place, kind = random.randrange(max(len(draft.config), 1)), random.random()
    if kind < 0.1:
        del draft.config[place]
    elif kind < 0.15:
        draft.config.append(random.choice(draft.config))
    elif kind < 0.25:
        draft.config.append((random.choice(("next_option", "", "R", "use_vera")), random.choice(JUNK)))
    elif kind < 0.35:
        pattern = random.choice(("q_proj", "^q_proj", "", "a b", "c_attn", "qkv_proj", "(.*)*$", "mlp.down_proj"))
        _put(draft, random.choice(PATTERNS), f'{{"{pattern}":{random.choice(JUNK)}}}')
    else:
        name = random.choice((*LIKELY, *(name for name, _ in draft.config)))
        _put(draft, name, json.dumps(random.choice(LIKELY[name])) if name in LIKELY and random.random() < 0.8
             else random.choice(JUNK))


def _put(draft: Draft, name: str, value: str) -> None:
    draft.config[:] = [pair for pair in draft.config if pair[0] != name] + [(name, value)]


def _damage_name(file: TensorFile, random: Random) -> None:
    """Give a tensor a name that peft writes for another module, another variant or another program."""
    if file.entries:
        place = random.randrange(len(file.entries))
        name, fields = file.entries[place]
        words = name.strip('"').split(".lora_")
        module = random.choice((words[0], PREFIX + random.choice(sorted(PROJECTIONS[random.choice(sorted(MODELS))])),
                                words[0].removeprefix(PREFIX), words[0].replace(".1.", ".2."),
                                PREFIX + "lm_head", PREFIX + "model.embed_tokens"))
        file.entries[place] = (f'"{module}.{random.choice(NAMES)}"', fields)
