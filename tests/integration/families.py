"""The model families whose tokens are compared with those of transformers, and the engines that run them."""

import pytest

FAMILIES = ["llama", "llama-yarn-bias", "mistral-window", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "phi3",
            "gpt-neox", "olmo2", "smollm3", "stablelm", "starcoder2",
            "phi", "cohere", "gptj", "granite", "cohere2", "opt", "stablelm-head-norms", "bloom", "falcon",
            "falcon-slopes", "mixtral-window", "qwen2-moe"]


def families_and_engines(names, engines, each):
    """Return the mark of a test that gets the fixture `reference` and the arguments `names`.

    Each family has `each` of the engines, in turn; the first family has all. The campaign
    same_tokens_as_transformers.py draws any family with any engine.

    engines   values of the arguments for each engine
    """
    sets = [(family, *engine) for number, family in enumerate(FAMILIES) for place, engine in enumerate(engines)
            if number == 0 or (place - number * each) % len(engines) < each]
    return pytest.mark.parametrize(("reference", *names), sets, indirect=["reference"])
