"""Model types of transformers that were proven to run in the engine, and why others do not run.

Written by tests/campaigns/transformers_types.py, which keeps its results in transformers_types.json.
"""

VERSIONS = {"transformers": "5.23.0", "torch": "2.13.0"}

# Model type -> the kinds of layers in the configurations that were tested.
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

# Model type -> the reason, as error messages quote it.
REFUSED: dict[str, str] = {
    "axk2":
        "AXK2ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subscriptable",
    "bailing_hybrid":
        "1 of 6 layers attend",
    "bamba":
        "transformers rejects it as a configuration of type 'bamba' (StrictDataclassFieldValidationError...",
    "bart":
        "logits of BartForCausalLM through the engine's attention differ by up to 3.82 from its own, wit...",
    "bert":
        "the mask of bert.encoder.layer.0.attention.self is not causal with one window: the query at 0 d...",
    "bert-generation":
        "the mask of bert.encoder.layer.0.attention.self is not causal with one window: the query at 0 d...",
    "big_bird":
        "BigBirdForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Ten...",
    "bigbird_pegasus":
        "logits of BigBirdPegasusForCausalLM through the engine's attention differ by up to 3.66 from it...",
    "blenderbot":
        "logits of BlenderbotForCausalLM through the engine's attention differ by up to 5.53 from its ow...",
    "blenderbot-small":
        "logits of BlenderbotSmallForCausalLM through the engine's attention differ by up to 0.947 from ...",
    "bloom":
        "BloomForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Tenso...",
    "blt":
        "its configuration contains another configuration",
    "camembert":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "codegen":
        "CodeGenForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Ten...",
    "cohere_compass_text":
        "it was not tested: KeyError: 'full_attention' (modeling_cohere_compass.py:77)",
    "cpmant":
        "CpmAntForCausalLM on the meta device raised AttributeError: 'NoneType' object has no attribute ...",
    "data2vec-text":
        "the mask of data2vec_text.encoder.layer.0.attention.self is not causal with one window: the que...",
    "dbrx":
        "its configuration contains another configuration",
    "deepseek_v32":
        "DeepseekV32ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not sub...",
    "deepseek_v4":
        "DeepseekV4ForCausalLM on the meta device raised AttributeError: 'NoneType' object has no attrib...",
    "diffllama":
        "model.layers.0.self_attn attends twice in one forward pass",
    "doge":
        "DogeForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attri...",
    "dots3_note":
        "its configuration contains another configuration",
    "dots3_note_text":
        "it was not tested: AmbiguousGlobalPerLayerAttributeError: 'num_attention_heads' is a per-layer ...",
    "electra":
        "the mask of electra.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "emu3":
        "its configuration contains another configuration",
    "ernie":
        "the mask of ernie.encoder.layer.0.attention.self is not causal with one window: the query at 0 ...",
    "falcon":
        "transformers cannot create the model (KeyError: 'batch_manager_discovery')",
    "falcon_h1":
        "transformers rejects it as a configuration of type 'falcon_h1' (StrictDataclassFieldValidationE...",
    "falcon_mamba":
        "no layer of FalconMambaForCausalLM calls transformers' attention interface",
    "fuyu":
        "its configuration contains another configuration",
    "gemma3":
        "its configuration contains another configuration",
    "gemma3n":
        "its configuration contains another configuration",
    "gemma3n_text":
        "logits of Gemma3nForCausalLM through the engine's attention differ by up to 1.94 from its own, ...",
    "gemma4":
        "its configuration contains another configuration",
    "gemma4_assistant":
        "its configuration contains another configuration",
    "gemma4_text":
        "it was not tested: AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute a...",
    "gemma4_unified":
        "its configuration contains another configuration",
    "gemma4_unified_assistant":
        "its configuration contains another configuration",
    "gemma4_unified_text":
        "it was not tested: AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute a...",
    "git":
        "its configuration contains another configuration",
    "glm_moe_dsa":
        "GlmMoeDsaForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subsc...",
    "got_ocr2":
        "its configuration contains another configuration",
    "gpt_neo":
        "it was not tested: no small model could be made: StrictDataclassClassValidationError: Class val...",
    "gpt_neox_japanese":
        "GPTNeoXJapaneseForCausalLM on the meta device raised TypeError: unsupported operand type(s) for...",
    "gptj":
        "transformers cannot create the model (KeyError: 'batch_manager_discovery')",
    "granitemoehybrid":
        "transformers rejects it as a configuration of type 'granitemoehybrid' (StrictDataclassFieldVali...",
    "hrm_text":
        "model.L_module.layers.0.self_attn attends twice in one forward pass",
    "hy_v4":
        "HYV4ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subscriptable",
    "inkling2_text":
        "model.layers.0.self_attn attends with position_bias",
    "inkling_text":
        "model.layers.0.self_attn attends with position_bias",
    "jamba":
        "1 of 6 layers attend",
    "jetmoe":
        "JetMoeForCausalLM on the meta device raised RuntimeError: split_with_sizes expects split_sizes ...",
    "kimi_linear":
        "1 of 6 layers attend",
    "lfm2_moe":
        "it was not tested: TypeError: 'NoneType' object is not subscriptable (modeling_lfm2_moe.py:472)",
    "lfm3":
        "2 of 6 layers attend",
    "llama4":
        "its configuration contains another configuration",
    "llama4_text":
        "the mask of model.layers.0.self_attn is not causal with one window: it cannot be read: RuntimeE...",
    "mamba":
        "no layer of MambaForCausalLM calls transformers' attention interface",
    "mamba2":
        "it was not tested: no small model could be made: StrictDataclassClassValidationError: Class val...",
    "marian":
        "logits of MarianForCausalLM through the engine's attention differ by up to 2.23 from its own, w...",
    "mbart":
        "logits of MBartForCausalLM through the engine's attention differ by up to 5.2 from its own, wit...",
    "megatron-bert":
        "MegatronBertForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +:...",
    "mimo_v2_flash":
        "(query heads, key heads, head size) are (4, 2, 16) in model.layers.0.self_attn and (4, 4, 16) i...",
    "minimax":
        "2 of 4 layers attend",
    "mllama":
        "its configuration contains another configuration",
    "moshi":
        "its configuration contains another configuration",
    "moss_transcribe_diarize":
        "its configuration contains another configuration",
    "mpt":
        "its configuration contains another configuration",
    "musicgen":
        "its configuration contains another configuration",
    "musicgen_melody":
        "its configuration contains another configuration",
    "mvp":
        "MvpForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attrib...",
    "nemotron_h":
        "transformers rejects it as a configuration of type 'nemotron_h' (StrictDataclassFieldValidation...",
    "olmo_hybrid":
        "1 of 4 layers attend",
    "openai-gpt":
        "no layer of OpenAIGPTLMHeadModel calls transformers' attention interface",
    "pegasus":
        "logits of PegasusForCausalLM through the engine's attention differ by up to 5.53 from its own, ...",
    "phi4_multimodal":
        "its configuration contains another configuration",
    "plbart":
        "logits of PLBartForCausalLM through the engine's attention differ by up to 1.26 from its own, w...",
    "prophetnet":
        "add_cross_attention is True",
    "qwen3_5":
        "its configuration contains another configuration",
    "qwen3_5_moe":
        "its configuration contains another configuration",
    "qwen3_5_moe_text":
        "1 of 4 layers attend",
    "qwen3_5_text":
        "1 of 4 layers attend",
    "qwen3_next":
        "1 of 4 layers attend",
    "qwen4_exp":
        "its configuration contains another configuration",
    "qwen4_exp_text":
        "it was not tested: TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType' (mo...",
    "recurrent_gemma":
        "1 of 4 layers attend",
    "reformer":
        "it was not tested: AssertionError: If you want to use `ReformerModelWithLMHead` make sure that ...",
    "rembert":
        "RemBertForCausalLM on the meta device raised RuntimeError: Attempting to broadcast a dimension ...",
    "roberta":
        "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...",
    "roberta-prelayernorm":
        "the mask of roberta_prelayernorm.encoder.layer.0.attention.self is not causal with one window: ...",
    "roc_bert":
        "the mask of roc_bert.encoder.layer.0.attention.self is not causal with one window: the query at...",
    "roformer":
        "RoFormerForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Te...",
    "rwkv":
        "no layer of RwkvForCausalLM calls transformers' attention interface",
    "trocr":
        "TrOCRForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attr...",
    "whisper":
        "max_position_embeddings is missing",
    "xglm":
        "XGLMForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attri...",
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
        "XmodForCausalLM on the meta device raised ValueError: Input language unknown. Please call `Xmod...",
    "zamba":
        "it was not tested: ValueError: There is an issue with your definition of `tie_weights_keys` for...",
    "zamba2":
        "it was not tested: no small model could be made: StrictDataclassClassValidationError: Class val...",
    "zaya":
        "it was not tested: no small model could be made: StrictDataclassClassValidationError: Class val...",
}
