"""config.json is read as transformers' own classes read it, or it is refused.

The reader treats a null like a missing field, even if transformers refuses the null. It refuses all other
configurations that transformers refuses.
"""

import json
import logging
from collections import Counter
from random import Random

import pytest

from batch_manager.errors import ModelLoadError
from batch_manager.layers.rotary import inverse_frequencies
from batch_manager.models import read_spec

pytest.importorskip("transformers")

from .random_configs import numbers_of_transformers, random_config  # noqa: E402

SEEDS = range(400)
OF_SOME = ("is_parallel", "rotates", "slides", "logit_scale", "embedding_scale", "residual_scale", "logits_divisor",
           "embedding_size", "norms_first", "has_last_norm", "norms_have_weights", "adds_to_normed", "has_own_norms",
           "norms_rows", "clip")


def numbers_of(spec):
    """Return {name: value} of a ModelSpec, with the keys that `numbers_of_transformers` uses."""
    numbers = {name: getattr(spec, name) for name in (
        "architecture", "num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "intermediate_size",
        "vocab_size", "max_position_embeddings", "norm_epsilon", "tie_word_embeddings", "activation", "qkv_bias",
        "out_bias", "mlp_bias", "qk_norm", "dtype")}
    numbers["windows"] = tuple(layer.window for layer in spec.attention)
    numbers["scales"] = tuple(layer.scale for layer in spec.attention)
    if spec.attention[0].alibi_slopes is not None:
        numbers["slopes"] = spec.attention[0].alibi_slopes
    if spec.rotary is not None:
        numbers["rotary_size"] = spec.rotary_size
        numbers["frequencies"] = frequencies_of(spec.rotary, spec.rotary_size or spec.head_size)
        numbers["amplitude"] = spec.rotary.amplitude
    if hasattr(spec, "sliding_rotary"):
        numbers["sliding_frequencies"] = frequencies_of(spec.sliding_rotary, spec.head_size)
    numbers |= {name: getattr(spec, name) for name in OF_SOME if hasattr(spec, name)}
    if any(spec.experts):
        numbers["experts"] = tuple(each and (each.count, each.chosen, each.size, each.renormalises, each.shared_size)
                                   for each in spec.experts)
    if hasattr(spec, "logits_softcap"):
        numbers["logits_softcap"] = spec.logits_softcap
        numbers["softcaps"] = tuple(layer.softcap for layer in spec.attention)
    return numbers


def frequencies_of(rotary, size):
    return tuple(round(float(number), 7) for number in inverse_frequencies(rotary, size))


def compare(folder, seed):
    """Read the random configuration of a seed, written to `folder`, with batch_manager and with transformers.

    Returns (result, error). The result is "read", "refused" or "refused by both". The error describes a difference
    between the two, or a refusal that does not name the folder. It is "" if there is none.
    """
    config = random_config(Random(seed))
    (folder / "config.json").write_text(json.dumps(config))
    expected = numbers_of_transformers(config)
    try:
        spec = read_spec(folder)
    except ModelLoadError as refusal:
        return "refused" if expected else "refused by both", "" if str(folder) in str(refusal) else str(refusal)
    found = numbers_of(spec)
    if expected is None and None not in config.values():
        return "read", f"transformers refuses {config}, read as {found}"
    differing = {name: (found.get(name), value) for name, value in (expected or {}).items() if found.get(name) != value}
    return "read", f"{config}: (here, transformers): {differing}" if differing else ""


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_random_configurations(tmp_path):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ends, wrong = Counter(), {}
    for seed in SEEDS:
        end, differing = compare(tmp_path, seed)
        ends[end] += 1
        if differing:
            wrong[seed] = differing
    assert not wrong, "\n".join(f"seed {seed}: {text}" for seed, text in list(wrong.items())[:5])
    assert ends["read"] > len(SEEDS) // 3 and ends["refused"] > len(SEEDS) // 20, ends
