"""Finds the model types of transformers that run in the engine, with a small random model of each.

    python tests/campaigns/transformers_types.py [--types llama,opt] [--seconds 60] [--write]

Each type runs in its own process, which has a time limit. SIZES shrinks each number of the type's configuration by its
name. Windows and chunks shrink to 8 or less, so that prompts of 50 tokens are longer. Layers are added until the model
has each kind of layer of the full-sized configuration.

Transformers saves the model, `load_model` loads it, and it runs three packed prompts in chunks and 12 generation steps.
Its logits are compared with those of the model's own eager attention in float32. The largest difference must be at most
1e-5 of the largest logit. In models that round more, the largest distance from float64 must be at most three times that
of the model's own float32.

The comparison is repeated with each switch of the configuration inverted, with a window if the type has none, with
other kinds of layers and with scaled rotary frequencies. Each variant must be equal or must be refused when it is
loaded.

--write   writes the result to batch_manager/models/transformers/proven_types.py and transformers_types.json beside this
          file. Results of other types stay if they have the same versions. Without this option, a table is printed
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
PROVEN_FILE = HERE.parents[1] / "batch_manager" / "models" / "transformers" / "proven_types.py"
TABLE_FILE = HERE / "transformers_types.json"
TOLERANCE = 1e-5
ROUNDING = 3.0                    # times the rounding of the model's own float32
PROMPTS, STEPS, CHUNK = [50, 23, 37], 12, 16
MOST_LAYERS = 12
MOST_BYTES = 6 * 2**30

# Names of numbers -> small value. The first pattern that matches counts.
SIZES = [
    (r"topk_blocks|local_blocks", 1),
    (r"vocab_size(_per_layer_input)?$", 97),
    (r"^(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|decoder_layers|encoder_layers|num_encoder_layers)$",
     "layers"),
    (r"nextn_predict|num_mtp|mtp_", 0),
    (r"num_kv_shared_layers", 0),
    (r"^(num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_global_key_value_heads)$", 2),
    (r"(num_attention_heads|n_heads?|num_heads|attention_heads|num_query_heads)$", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim", 8),
    (r"(head_dim|head_size)$", 16),
    (r"lora_rank$|_rank$", 16),
    (r"moe_intermediate|shared_expert_intermediate|expert_ffn|expert_hidden|intermediate_size_mlp", 48),
    (r"intermediate_size|ffn_dim|n_inner|ffn_hidden|inner_dim", 96),
    (r"^(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|embedding_size|hidden_dim|model_dim|emb_dim|"
     r"dim_model)$", 64),
    (r"experts_per_tok|top_k|topk$|moe_k|num_selected_experts|moe_topk|experts_top_k", 2),
    (r"n_group|topk_group|num_expert_group|expert_group", 1),
    (r"^n_shared_experts$", 1),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts|num_routed_experts|zero_expert_num)$",
     8),
    (r"first_k_dense|num_dense_layers|moe_layer_start|first_dense", 1),
    (r"max_position|n_positions|n_ctx|max_seq|max_sequence_length|max_context", 512),
    (r"sliding_window$|window_size|attention_window|local_window|swa_window|^sliding_window_size", 8),
    (r"chunk_size|chunk_len|block_size|index_topk|index_block|compress_ratio", 8),
    (r"floor_scale|scaling_beta_floor", 4),
    (r"rotary_dim", 8),
    (r"index_n_heads|index_head", 4),
]
# Switches that do not affect a generating decoder, or that the loader ignores.
NOT_SWITCHED = {"use_cache", "is_decoder", "output_attentions", "output_hidden_states", "output_router_logits",
                "return_dict", "torchscript", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder",
                "scale_attn_weights", "use_mamba_kernels", "gradient_checkpointing", "chunk_size_feed_forward"}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
}


class CannotShrinkError(Exception):
    pass


class RoundsMoreError(Exception):
    """The engine's float32 logits are about as far from float64 as the model's own. The message has the distances."""


def shrunk(config_class, num_layers: int) -> dict:
    """Return small values for the numeric fields of a configuration class."""
    full = config_class()
    values = {}
    inverse = {own: common for common, own in config_class.attribute_map.items()}
    for field in dataclasses.fields(config_class):
        name, value = field.name, getattr(full, field.name, None)
        common = inverse.get(name, name)
        if name.endswith("_token_id") or name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"):
            values[name] = None if type(value) is not int else min(max(value, 0), 1)
            continue
        if value is None and name in ("num_key_value_heads", "num_kv_heads", "n_routed_experts", "head_dim",
                                      "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts"):
            value = 2
        if isinstance(value, dict) and name == "rope_parameters":
            values[name] = with_few_positions(value)
        if type(value) is not int:
            continue
        for pattern, size in SIZES:
            if re.search(pattern, name) or re.search(pattern, common):
                values[name] = num_layers if size == "layers" else size if value else value
                break
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]
    if "kv_lora_rank" in values and "num_key_value_heads" in values:         # each head has its own keys
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers"):
        if isinstance(getattr(full, name, None), list) and name in {f.name for f in dataclasses.fields(config_class)}:
            values[name] = None
    return values


def with_few_positions(rope: dict) -> dict:
    """Return the rotary parameters with 8 original positions, fewer than the prompts have."""
    return {name: with_few_positions(value) if isinstance(value, dict)
            else 8 if name == "original_max_position_embeddings" and value else value for name, value in rope.items()}


def small_config(config_class, **options):
    """Return a configuration with few small layers, with each kind of layer of the full-sized one."""
    from batch_manager.models.transformers.configuration import kinds_of

    try:
        wanted = kinds_of(config_class())
    except Exception as error:
        raise CannotShrinkError(f"no default configuration: {error}") from error
    faults = []
    for num_layers in (4, 6, 8, MOST_LAYERS):
        values = shrunk(config_class, num_layers) | options
        for left_out in ({}, {"layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers"}):
            try:
                made = config_class(**{name: value for name, value in values.items() if name not in left_out})
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")
                continue
            if wanted <= kinds_of(made) or "layer_types" in options:
                return made
            faults.append(f"{num_layers} layers have no {', '.join(sorted(wanted - kinds_of(made)))}")
    raise CannotShrinkError("; ".join(dict.fromkeys(" ".join(fault.split())[:200] for fault in faults[-2:])))


def random_model(model_class, config):
    """Return a model in which each weight has an effect: norms differ from one, biases and buffers from zero."""
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > 2e7:
        raise CannotShrinkError(f"the small model has {count:,} parameters")
    stored = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in stored or not tensor.is_floating_point():
                continue
            if tensor.dim() <= 1:
                is_bias = name.endswith("bias") or tensor.dim() == 0
                tensor.normal_(0.0 if is_bias else 1.0, 0.2)
            else:
                tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5)
    return model


def compared(model_class, config) -> tuple[float, float]:
    """Return (largest difference of the engine's logits from the model's own, largest logit), for a random model.

    Raises ConfigError if `load_model` refuses the model, and RoundsMoreError for a difference that rounding explains.
    """
    from batch_manager.models import load_model
    from tests.models.conftest import Driver, expected_logits, random_prompts

    model = random_model(model_class, config)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder)
        file = Path(folder, "config.json")
        values = json.loads(file.read_text())
        values["architectures"] = [model_class.__name__]
        file.write_text(json.dumps(values))
        loaded = load_model(folder, device="cpu", model_implementation="transformers")
    run = Driver(loaded, shuffled=True)
    sequences, logits = run.generate(random_prompts(PROMPTS, config.vocab_size), STEPS, CHUNK)
    model.config._attn_implementation = "eager"
    expected = expected_logits(model, sequences, STEPS)
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    if TOLERANCE * largest < difference < 100 * TOLERANCE * largest:
        model.config._experts_implementation = "eager"               # other implementations have no float64
        exact = expected_logits(model.double(), sequences, STEPS)
        own, ours = ((one - exact).abs().max().item() for one in (expected, logits))
        if ours <= ROUNDING * own:
            raise RoundsMoreError(f"{ours:.1e} from float64, its own float32 {own:.1e}, of {largest:.1f}")
    return difference, largest


def variants_of(config_class) -> dict[str, dict]:
    """Return the variants of the default configuration: name of the variant -> options that differ."""
    full = config_class()
    names = {field.name for field in dataclasses.fields(config_class)}
    found = {}
    for name in sorted(names - NOT_SWITCHED):
        value = getattr(full, name, None)
        if isinstance(value, bool) and not name.startswith("_"):
            found[f"{name}={not value}"] = {name: not value}
    if "sliding_window" in names:
        window = {"sliding_window": 8}
        if "use_sliding_window" in names:
            window["use_sliding_window"] = True
        if "max_window_layers" in names:
            window["max_window_layers"] = 1
        found["window"] = window
        if getattr(full, "sliding_window", None) is not None:
            found["no window"] = {"sliding_window": None}
    if "layer_types" in names:
        found["all full"] = {"layer_types": ["full_attention"] * 4}
        window = {"sliding_window": 8, **({"use_sliding_window": True} if "use_sliding_window" in names else {})}
        found["sliding and full"] = {"layer_types": ["sliding_attention", "full_attention"] * 2, **window}
    if "mlp_layer_types" in names:
        found["dense and sparse"] = {"mlp_layer_types": ["dense", "sparse"] * 2}
    if "rope_parameters" in names and not isinstance(getattr(full, "layer_types", None), list):
        found |= {f"rope {kind}": {"rope_parameters": {**rope, "rope_theta": 10000.0}} for kind, rope in ROPES.items()}
    return found


def try_type(model_type: str) -> dict:
    """Test the model type and its variants. Returns the record of the type, with its verdict."""
    import transformers

    from batch_manager.errors import ConfigError
    from batch_manager.models.transformers import model
    from batch_manager.models.transformers.configuration import kinds_of
    from batch_manager.models.transformers.proven_types import PROVEN

    result = {"type": model_type}
    try:
        config_class = transformers.CONFIG_MAPPING[model_type]
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        result["architecture"] = model_class.__name__
        if config_class.sub_configs:
            return result | {"verdict": "refused", "reason": "its configuration contains another configuration"}
        config = small_config(config_class)
        result["layers"] = getattr(config, "num_hidden_layers", None)
        PROVEN[model_type] = ()
        model.refuse_untested_kinds = lambda *given: None            # this run tests them
        kinds = kinds_of(config)
        error, scale = compared(model_class, copy.deepcopy(config))
    except RoundsMoreError as fault:
        result |= {"rounding": str(fault)}
        error = scale = 0.0
    except CannotShrinkError as fault:
        return result | {"verdict": "not tried", "reason": f"no small model could be made: {fault}"}
    except ConfigError as fault:
        return result | {"verdict": "refused", "reason": without_path(str(fault))}
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        return result | {"verdict": "not tried", "reason": " ".join(
            f"{type(fault).__name__}: {fault} ({Path(where.filename).name}:{where.lineno})".split())[:300]}
    if not scale < float("inf"):
        return result | {"verdict": "not tried", "reason": "the random model's own logits are not finite"}
    result |= {"difference": error, "largest": scale}
    if not error <= TOLERANCE * scale:
        return result | {"verdict": "wrong", "reason": f"logits differ by {error:.2g}, the largest is {scale:.2g}"}
    result["variants"] = {}
    for name, options in variants_of(config_class).items():
        try:
            config = small_config(config_class, **options)
            tried = kinds_of(config)
            error, scale = compared(model_class, config)
            told = f"equal, {error:.1e} of {scale:.1f}" if error <= TOLERANCE * scale else (
                f"WRONG, {error:.1e} of {scale:.1f}")
            kinds |= tried
        except RoundsMoreError as fault:
            told = f"equal, {fault}"
            kinds |= tried
        except ConfigError as fault:
            told = "refused: " + without_path(str(fault))
        except Exception as fault:
            told = " ".join(f"not tried: {type(fault).__name__}: {fault}".split())[:160]
        result["variants"][name] = told
    wrong = [name for name, told in result["variants"].items() if told.startswith("WRONG")]
    if wrong:
        return result | {"verdict": "wrong", "reason": f"logits differ with {wrong[0]}"}
    return result | {"verdict": "passed", "kinds": sorted(kinds)}


def without_path(text: str) -> str:
    return " ".join(re.sub(r"/\S*config\.json: ", "", text).split())[:300]


def in_child(model_type: str, seconds: float) -> dict:
    """Run `try_type` in a forked process with limits on time and memory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        theirs.send(try_type(model_type))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else {
            "type": model_type, "verdict": "not tried", "reason": f"it took more than {seconds:g} s"}
    except EOFError:
        return {"type": model_type, "verdict": "not tried", "reason": "its process ended"}
    finally:
        process.kill()
        process.join()


def write(results: list[dict]) -> None:
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    before = json.loads(TABLE_FILE.read_text())
    if before["versions"] == versions:
        results = sorted(({result["type"]: result for result in [*before["types"], *results]}).values(),
                         key=lambda result: result["type"])
    TABLE_FILE.write_text(json.dumps({"versions": versions, "tolerance": TOLERANCE, "types": results}, indent=1) + "\n")
    proven, refused = {}, {}
    for result in results:
        name = result["type"]
        if result["verdict"] == "passed":
            proven[name] = tuple(result["kinds"])
        else:
            before = {"wrong": "it computes something else: ", "not tried": "it was not tested: "}
            refused[name] = short(before.get(result["verdict"], "") + result["reason"])
    lines = ['"""Model types of transformers that were proven to run in the engine, and why others do not run.', "",
             "Written by tests/campaigns/transformers_types.py, which keeps its results in transformers_types.json.",
             '"""', "", f"VERSIONS = {json.dumps(versions)}", "",
             *grouped("Kinds of layers in the configurations that were tested, by comma -> model types.", "_PROVEN", {
                 name: ", ".join(kinds) for name, kinds in proven.items()}),
             "", *grouped("Reason, as error messages quote it -> model types.", "_REFUSED", refused), "",
             "PROVEN = {name: tuple(filter(None, kinds.split(\", \"))) for kinds, names in _PROVEN.items() "
             "for name in names.split()}",
             "REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}", ""]
    PROVEN_FILE.write_text("\n".join(lines))


def grouped(comment: str, name: str, table: dict[str, str]) -> list[str]:
    """Return the lines of a dictionary: value of `table` -> its keys, with blanks between them."""
    lines = [f"# {comment}", f"{name} = {{"]
    for value in dict.fromkeys(value for _, value in sorted(table.items())):
        names = textwrap.wrap(" ".join(key for key in sorted(table) if table[key] == value), 108,
                              break_on_hyphens=False)
        lines += [f"    {json.dumps(value)}:", *(f"        {json.dumps(f'{line} ')}" for line in names[:-1]),
                  f"        {json.dumps(names[-1])},"]
    return [*lines, "}"]


def short(reason: str) -> str:
    reason = reason.split("; ")[0]
    return reason if len(reason) <= 98 else reason[:95] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", type=lambda text: text.split(","), default=None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each type")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parents[1]))
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import tests.models.conftest  # noqa: F401   forked processes inherit it

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started, results = time.monotonic(), []
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result = in_child(model_type, options.seconds)
        results.append(result)
        told = result.get("reason") or result.get("rounding") or (
            f"{result['difference']:.1e} of {result['largest']:.1f}")
        print(f"{result['verdict']:10} {model_type:24} {told}", flush=True)
        for name, variant in result.get("variants", {}).items():
            if options.types or variant.startswith("WRONG"):
                print(f"{'':12}{name}: {variant}", flush=True)
    verdicts = [result["verdict"] for result in results]
    print(f"{len(results)} types in {time.monotonic() - started:.0f} s: "
          + ", ".join(f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts)))
    if options.write:
        write(results)


if __name__ == "__main__":
    main()
