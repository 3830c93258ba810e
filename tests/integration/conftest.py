"""Checkpoints with random weights, saved by transformers, and the tokens that transformers generates from them."""

import functools
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.integration.families import FAMILIES  # noqa: E402
from tests.integration.greedy_model import GreedyModel  # noqa: E402

VOCAB = 211
COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, bos_token_id=None,
              eos_token_id=None, pad_token_id=None)


@pytest.fixture(autouse=True, scope="module")
def drafts_cost_the_same_on_every_machine():
    """In models this small, a draft is measured to cost anything up to a whole step, and then none is proposed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batch_manager.runtime.build_backend.measured_draft_cost", lambda *given: 0.08)
        yield


def _config(family: str):
    if family == "llama":
        return transformers.LlamaConfig(**COMMON, tie_word_embeddings=False)
    if family == "llama-yarn-bias":
        return transformers.LlamaConfig(
            **{**COMMON, "num_key_value_heads": 4}, head_dim=32, attention_bias=True, tie_word_embeddings=True,
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 128})
    if family == "mistral-window":
        return transformers.MistralConfig(**COMMON, sliding_window=48)
    if family == "qwen2":
        return transformers.Qwen2Config(**COMMON, tie_word_embeddings=True)
    if family == "qwen3":
        return transformers.Qwen3Config(**COMMON, head_dim=32)
    if family == "gemma2":
        return transformers.Gemma2Config(**COMMON, head_dim=32, sliding_window=48, query_pre_attn_scalar=24,
                                         attn_logit_softcapping=4.0, final_logit_softcapping=6.0)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**COMMON, head_dim=32, sliding_window=40, query_pre_attn_scalar=24,
                                             layer_types=["sliding_attention", "full_attention"])
    if family == "phi3":
        return transformers.Phi3Config(**COMMON, original_max_position_embeddings=512, sliding_window=48,
                                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                                        "partial_rotary_factor": 0.5})
    if family == "gpt-neox":
        return transformers.GPTNeoXConfig(**{name: value for name, value in COMMON.items()
                                             if name != "num_key_value_heads"})
    if family == "smollm3":
        return transformers.SmolLM3Config(**COMMON, no_rope_layer_interval=2, use_sliding_window=True,
                                          sliding_window=48)
    if family == "stablelm":
        return transformers.StableLmConfig(**COMMON, use_parallel_residual=True, use_qkv_bias=True)
    if family == "starcoder2":
        return transformers.Starcoder2Config(**COMMON, sliding_window=48)
    if family == "phi":
        return transformers.PhiConfig(**COMMON, qk_layernorm=True)
    if family == "cohere":
        return transformers.CohereConfig(**COMMON, logit_scale=0.5)
    if family == "gptj":
        return transformers.GPTJConfig(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, rotary_dim=8,
                                       initializer_range=0.15, bos_token_id=None, eos_token_id=None)
    if family == "granite":
        return transformers.GraniteConfig(**COMMON, embedding_multiplier=2.0, residual_multiplier=0.5,
                                          attention_multiplier=0.3, logits_scaling=2.0)
    if family == "cohere2":
        return transformers.Cohere2Config(**COMMON, logit_scale=0.5, sliding_window=48,
                                          layer_types=["sliding_attention", "full_attention"])
    if family == "olmo2":
        return transformers.Olmo2Config(**COMMON)
    if family == "stablelm-head-norms":
        return transformers.StableLmConfig(**COMMON, qk_layernorm=True)
    if family == "opt":
        return transformers.OPTConfig(**{name: value for name, value in COMMON.items() if name not in (
            "num_key_value_heads", "intermediate_size", "initializer_range")}, ffn_dim=96,
            do_layer_norm_before=False, init_std=0.15)
    if family.startswith("falcon"):
        options = {name: value for name, value in COMMON.items() if name not in (
            "num_key_value_heads", "intermediate_size")}
        if family == "falcon-slopes":
            return transformers.FalconConfig(**options, alibi=True, multi_query=False, bias=True)
        return transformers.FalconConfig(**options, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96)
    if family == "bloom":
        return transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.15,
                                        seq_length=512, bos_token_id=None, eos_token_id=None)
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512,
                                       initializer_range=0.15, bos_token_id=None, eos_token_id=None)
    if family == "mixtral-window":
        return transformers.MixtralConfig(**COMMON, num_local_experts=8, sliding_window=48)
    if family == "qwen2-moe":
        return transformers.Qwen2MoeConfig(**COMMON, num_experts=8, moe_intermediate_size=32, mlp_only_layers=[0],
                                           shared_expert_intermediate_size=64)
    # The families below have no native class.
    if family == "exaone4":
        return transformers.Exaone4Config(**COMMON, sliding_window=40, layer_types=["sliding_attention",
                                                                                    "full_attention"])
    if family == "helium":
        return transformers.HeliumConfig(**COMMON, head_dim=16)
    if family == "gpt-bigcode":
        return transformers.GPTBigCodeConfig(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512,
                                             initializer_range=0.15, bos_token_id=None, eos_token_id=None)
    raise KeyError(family)


class Reference(GreedyModel):
    """A transformers model in float32 on the CPU, and the folder of its checkpoint."""

    def __init__(self, family: str, folder) -> None:
        super().__init__()
        torch.manual_seed(sum(map(ord, family)))
        config = _config(family)
        # Falcon's eager attention adds ALiBi twice: in the mask and in the scores.
        attention = "sdpa" if family.startswith("falcon") else "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        self.model.save_pretrained(folder)
        self.family, self.folder, self.vocab_size = family, folder, VOCAB
        assert json.loads((folder / "config.json").read_text())["architectures"]
        self._logits: dict[tuple, np.ndarray] = {}

    def likeliest(self, tokens: list[int]) -> list[int]:
        return self.logits(tokens).argmax(1).tolist()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        ids, cache, tokens = torch.tensor([prompt]), None, []
        with torch.inference_mode():
            for _ in range(count):
                output = self.model(ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                tokens.append(int(output.logits[0, -1].argmax()))
                ids = torch.tensor([[tokens[-1]]])
        return tokens

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits [len(tokens), vocab_size] of one forward pass."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self.model(torch.tensor([tokens])).logits[0].numpy()
        return self._logits[key]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """references(family) -> Reference. Each Reference is made once per process and caches its tokens."""
    return functools.cache(lambda family: Reference(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request, references):
    return references(request.param)


@pytest.fixture(scope="session")
def llama_reference(references):
    return references("llama")
