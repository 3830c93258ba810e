"""Model types of transformers that were proven to run in the engine, and why others are not run.

Written by tests/campaigns/transformers_types.py; the figures are beside it in transformers_types.json.
"""

VERSIONS = {"transformers": "5.23.0", "torch": "2.13.0"}

# Type -> the kinds of layers that its configurations named, of all with which it was tried.
PROVEN: dict[str, tuple[str, ...]] = {
    "afmoe": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "apertus": (),
    "arcee": (),
    "aria_text": (),
    "axk1": ("mlp_layer_types: dense", "mlp_layer_types: sparse"),
    "beam": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "biogpt": (),
    "bitnet": (),
    "cohere": (),
    "cohere2": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "cohere2_moe": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "ctrl": (),
    "cwm": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "deepseek_v2": (),
    "deepseek_v3": (),
    "dots1": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "ernie4_5": (),
    "ernie4_5_moe": (),
    "exaone4": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "exaone_moe": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "flex_olmo": (),
    "flint": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "gemma": (),
    "gemma2": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "gemma3_text": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "glm": (),
    "glm4": (),
    "glm4_moe": (),
    "glm4_moe_lite": ("mlp_layer_types: dense", "mlp_layer_types: sparse"),
    "gpt-sw3": (),
    "gpt2": (),
    "gpt_bigcode": (),
    "gpt_neox": (),
    "gpt_oss": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "granite": (),
    "granite_swa": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "granitemoe": (),
    "granitemoe_swa": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "granitemoeshared": (),
    "helium": (),
    "hunyuan_v1_dense": (),
    "hunyuan_v1_moe": (),
    "hy_v3": ("mlp_layer_types: dense", "mlp_layer_types: sparse"),
    "hyperclovax": (),
    "internlm3": (),
    "iquestcoder": (),
    "jais2": (),
    "kolibri1": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "laguna": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "lfm2": ("layer_types: full_attention",),
    "llama": (),
    "longcat_flash": (),
    "mellum": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "minicpm3": (),
    "minimax_m2": (),
    "minimax_m3_vl_text": (
        "layer_types: full_attention",
        "layer_types: sliding_attention",
        "mlp_layer_types: dense",
        "mlp_layer_types: sparse",
    ),
    "ministral": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "ministral3": (),
    "mistral": (),
    "mixtral": (),
    "modernbert-decoder": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "nanochat": (),
    "nemotron": (),
    "olmo": (),
    "olmo2": (),
    "olmo3": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "olmoe": (),
    "opt": (),
    "persimmon": (),
    "phi": (),
    "phi3": (),
    "phimoe": (),
    "qwen2": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "qwen2_moe": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "qwen3": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "qwen3_moe": (),
    "seed_oss": (),
    "smollm3": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "solar_open": (),
    "stablelm": (),
    "starcoder2": (),
    "vaultgemma": ("layer_types: full_attention", "layer_types: sliding_attention"),
    "youtu": (),
}

# Type -> the reason, as a message gives it.
REFUSED: dict[str, str] = {
    "axk2":
        "a forward without values of AXK2ForCausalLM raised TypeError: 'MaskDescription' object is not s...",
    "bailing_hybrid":
        "1 of 6 layers attend",
    "bamba":
        "transformers does not take it as a configuration of type 'bamba' (StrictDataclassFieldValidatio...",
    "bart":
        "BartForCausalLM through the engine's attention makes logits that differ by 3.82 from its own, o...",
    "bert":
        "the mask of bert.encoder.layer.0.attention.self is not causal with one window: the query at 0 d...",
    "bert-generation":
        "the mask of bert.encoder.layer.0.attention.self is not causal with one window: the query at 0 d...",
    "big_bird":
        "a forward without values of BigBirdForCausalLM raised TypeError: unsupported operand type(s) fo...",
    "bigbird_pegasus":
        "BigBirdPegasusForCausalLM through the engine's attention makes logits that differ by 3.66 from ...",
    "blenderbot":
        "BlenderbotForCausalLM through the engine's attention makes logits that differ by 5.53 from its ...",
    "blenderbot-small":
        "BlenderbotSmallForCausalLM through the engine's attention makes logits that differ by 0.947 fro...",
    "bloom":
        "a forward without values of BloomForCausalLM raised TypeError: unsupported operand type(s) for ...",
    "blt":
        "it joins a text model with another one",
    "camembert":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "codegen":
        "a forward without values of CodeGenForCausalLM raised TypeError: unsupported operand type(s) fo...",
    "cohere_compass_text":
        "it was not tried: KeyError: 'full_attention' (modeling_cohere_compass.py:77)",
    "cpmant":
        "a forward without values of CpmAntForCausalLM raised AttributeError: 'NoneType' object has no a...",
    "data2vec-text":
        "the mask of data2vec_text.encoder.layer.0.attention.self is not causal with one window: the que...",
    "dbrx":
        "it joins a text model with another one",
    "deepseek_v32":
        "a forward without values of DeepseekV32ForCausalLM raised TypeError: 'MaskDescription' object i...",
    "deepseek_v4":
        "a forward without values of DeepseekV4ForCausalLM raised AttributeError: 'NoneType' object has ...",
    "diffllama":
        "model.layers.0.self_attn attends twice in one forward",
    "doge":
        "a forward without values of DogeForCausalLM raised AttributeError: 'MaskDescription' object has...",
    "dots3_note":
        "it joins a text model with another one",
    "dots3_note_text":
        "it was not tried: AmbiguousGlobalPerLayerAttributeError: 'num_attention_heads' is a per-layer a...",
    "electra":
        "the mask of electra.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "emu3":
        "it joins a text model with another one",
    "ernie":
        "the mask of ernie.encoder.layer.0.attention.self is not causal with one window: the query at 0 ...",
    "falcon":
        "transformers cannot make the model (KeyError: 'batch_manager_discovery')",
    "falcon_h1":
        "transformers does not take it as a configuration of type 'falcon_h1' (StrictDataclassFieldValid...",
    "falcon_mamba":
        "no layer of FalconMambaForCausalLM calls transformers' attention interface",
    "fuyu":
        "it joins a text model with another one",
    "gemma3":
        "it joins a text model with another one",
    "gemma3n":
        "it joins a text model with another one",
    "gemma3n_text":
        "Gemma3nForCausalLM through the engine's attention makes logits that differ by 1.94 from its own...",
    "gemma4":
        "it joins a text model with another one",
    "gemma4_assistant":
        "it joins a text model with another one",
    "gemma4_text":
        "it was not tried: AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute an...",
    "gemma4_unified":
        "it joins a text model with another one",
    "gemma4_unified_assistant":
        "it joins a text model with another one",
    "gemma4_unified_text":
        "it was not tried: AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute an...",
    "git":
        "it joins a text model with another one",
    "glm_moe_dsa":
        "a forward without values of GlmMoeDsaForCausalLM raised TypeError: 'MaskDescription' object is ...",
    "got_ocr2":
        "it joins a text model with another one",
    "gpt_neo":
        "it was not tried: no small model could be made: StrictDataclassClassValidationError: Class vali...",
    "gpt_neox_japanese":
        "a forward without values of GPTNeoXJapaneseForCausalLM raised TypeError: unsupported operand ty...",
    "gptj":
        "transformers cannot make the model (KeyError: 'batch_manager_discovery')",
    "granitemoehybrid":
        "transformers does not take it as a configuration of type 'granitemoehybrid' (StrictDataclassFie...",
    "hrm_text":
        "model.L_module.layers.0.self_attn attends twice in one forward",
    "hy_v4":
        "a forward without values of HYV4ForCausalLM raised TypeError: 'MaskDescription' object is not s...",
    "inkling2_text":
        "model.layers.0.self_attn attends with position_bias",
    "inkling_text":
        "model.layers.0.self_attn attends with position_bias",
    "jamba":
        "1 of 6 layers attend",
    "jetmoe":
        "a forward without values of JetMoeForCausalLM raised RuntimeError: split_with_sizes expects spl...",
    "kimi_linear":
        "1 of 6 layers attend",
    "lfm2_moe":
        "it was not tried: TypeError: 'NoneType' object is not subscriptable (modeling_lfm2_moe.py:472)",
    "lfm3":
        "2 of 6 layers attend",
    "llama4":
        "it joins a text model with another one",
    "llama4_text":
        "the mask of model.layers.0.self_attn is not causal with one window: it cannot be read: RuntimeE...",
    "mamba":
        "no layer of MambaForCausalLM calls transformers' attention interface",
    "mamba2":
        "it was not tried: no small model could be made: StrictDataclassClassValidationError: Class vali...",
    "marian":
        "MarianForCausalLM through the engine's attention makes logits that differ by 2.23 from its own,...",
    "mbart":
        "MBartForCausalLM through the engine's attention makes logits that differ by 5.2 from its own, o...",
    "megatron-bert":
        "a forward without values of MegatronBertForCausalLM raised TypeError: unsupported operand type(...",
    "mimo_v2_flash":
        "heads of model.layers.0.self_attn are (4, 2, 16) and those of model.layers.1.self_attn (4, 4, 16)",
    "minimax":
        "2 of 4 layers attend",
    "mllama":
        "it joins a text model with another one",
    "moshi":
        "it joins a text model with another one",
    "moss_transcribe_diarize":
        "it joins a text model with another one",
    "mpt":
        "it joins a text model with another one",
    "musicgen":
        "it joins a text model with another one",
    "musicgen_melody":
        "it joins a text model with another one",
    "mvp":
        "a forward without values of MvpForCausalLM raised AttributeError: 'MaskDescription' object has ...",
    "nemotron_h":
        "transformers does not take it as a configuration of type 'nemotron_h' (StrictDataclassFieldVali...",
    "olmo_hybrid":
        "1 of 4 layers attend",
    "openai-gpt":
        "no layer of OpenAIGPTLMHeadModel calls transformers' attention interface",
    "pegasus":
        "PegasusForCausalLM through the engine's attention makes logits that differ by 5.53 from its own...",
    "phi4_multimodal":
        "it joins a text model with another one",
    "plbart":
        "PLBartForCausalLM through the engine's attention makes logits that differ by 1.26 from its own,...",
    "prophetnet":
        "add_cross_attention is True",
    "qwen3_5":
        "it joins a text model with another one",
    "qwen3_5_moe":
        "it joins a text model with another one",
    "qwen3_5_moe_text":
        "1 of 4 layers attend",
    "qwen3_5_text":
        "1 of 4 layers attend",
    "qwen3_next":
        "1 of 4 layers attend",
    "qwen4_exp":
        "it joins a text model with another one",
    "qwen4_exp_text":
        "it was not tried: TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType' (mod...",
    "recurrent_gemma":
        "1 of 4 layers attend",
    "reformer":
        "it was not tried: AssertionError: If you want to use `ReformerModelWithLMHead` make sure that `...",
    "rembert":
        "a forward without values of RemBertForCausalLM raised RuntimeError: Attempting to broadcast a d...",
    "roberta":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "roberta-prelayernorm":
        "the mask of roberta_prelayernorm.encoder.layer.0.attention.self is not causal with one window: ...",
    "roc_bert":
        "the mask of roc_bert.encoder.layer.0.attention.self is not causal with one window: the query at...",
    "roformer":
        "a forward without values of RoFormerForCausalLM raised TypeError: unsupported operand type(s) f...",
    "rwkv":
        "no layer of RwkvForCausalLM calls transformers' attention interface",
    "trocr":
        "a forward without values of TrOCRForCausalLM raised AttributeError: 'MaskDescription' object ha...",
    "whisper":
        "max_position_embeddings is missing",
    "xglm":
        "a forward without values of XGLMForCausalLM raised AttributeError: 'MaskDescription' object has...",
    "xlm":
        "no layer of XLMWithLMHeadModel calls transformers' attention interface",
    "xlm-roberta":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "xlm-roberta-xl":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "xlnet":
        "max_position_embeddings is -1",
    "xlstm":
        "no layer of xLSTMForCausalLM calls transformers' attention interface",
    "xmod":
        "a forward without values of XmodForCausalLM raised ValueError: Input language unknown. Please c...",
    "zamba":
        "it was not tried: ValueError: There is an issue with your definition of `tie_weights_keys` for ...",
    "zamba2":
        "it was not tried: no small model could be made: StrictDataclassClassValidationError: Class vali...",
    "zaya":
        "it was not tried: no small model could be made: StrictDataclassClassValidationError: Class vali...",
}
