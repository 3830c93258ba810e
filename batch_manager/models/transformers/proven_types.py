"""Model types of transformers that were proven to run in the engine, and why others do not run.

Written by tests/campaigns/transformers_types.py, which keeps its results in transformers_types.json.
"""

VERSIONS = {"transformers": "5.23.0", "torch": "2.13.0"}

# Kinds of layers in the configurations that were tested, by comma -> model types.
_PROVEN = {
    "layer_types: full_attention, layer_types: sliding_attention":
        "afmoe cohere2 cwm dots1 exaone4 flint gemma2 gemma3_text gpt_oss granite_swa granitemoe_swa kolibri1 "
        "ministral modernbert-decoder olmo3 qwen2 qwen2_moe qwen3 smollm3 vaultgemma",
    "":
        "apertus arcee aria_text biogpt bitnet cohere ctrl deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe flex_olmo "
        "gemma glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium "
        "hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 iquestcoder jais2 llama longcat_flash minicpm3 "
        "minimax_m2 ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmoe opt persimmon phi phi3 phimoe "
        "qwen3_moe seed_oss solar_open stablelm starcoder2 youtu",
    "mlp_layer_types: dense, mlp_layer_types: sparse":
        "axk1 glm4_moe_lite hy_v3",
    "layer_types: full_attention, layer_types: sliding_attention, mlp_layer_types: dense, mlp_layer_types: sparse":
        "beam cohere2_moe exaone_moe laguna mellum minimax_m3_vl_text",
    "layer_types: full_attention":
        "lfm2",
}

# Reason, as error messages quote it -> model types.
_REFUSED = {
    "AXK2ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subscriptable":
        "axk2",
    "1 of 6 layers attend":
        "bailing_hybrid jamba kimi_linear",
    "transformers rejects it as a configuration of type 'bamba' (StrictDataclassFieldValidationError...":
        "bamba",
    "logits of BartForCausalLM through the engine's attention differ by up to 3.82 from its own, wit...":
        "bart",
    "the mask of bert.encoder.layer.0.attention.self is not causal with one window: the query at 0 d...":
        "bert bert-generation",
    "BigBirdForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Ten...":
        "big_bird",
    "logits of BigBirdPegasusForCausalLM through the engine's attention differ by up to 3.66 from it...":
        "bigbird_pegasus",
    "logits of BlenderbotForCausalLM through the engine's attention differ by up to 5.53 from its ow...":
        "blenderbot",
    "logits of BlenderbotSmallForCausalLM through the engine's attention differ by up to 0.947 from ...":
        "blenderbot-small",
    "BloomForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Tenso...":
        "bloom",
    "its configuration contains another configuration":
        "blt dbrx dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant "
        "git got_ocr2 llama4 mllama moshi moss_transcribe_diarize mpt musicgen musicgen_melody phi4_multimodal "
        "qwen3_5 qwen3_5_moe qwen4_exp",
    "the mask of roberta.encoder.layer.0.attention.self is not causal with one window: the query at ...":
        "camembert roberta xlm-roberta xlm-roberta-xl",
    "CodeGenForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Ten...":
        "codegen",
    "it was not tested: KeyError: 'full_attention' (modeling_cohere_compass.py:77)":
        "cohere_compass_text",
    "CpmAntForCausalLM on the meta device raised AttributeError: 'NoneType' object has no attribute ...":
        "cpmant",
    "the mask of data2vec_text.encoder.layer.0.attention.self is not causal with one window: the que...":
        "data2vec-text",
    "DeepseekV32ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not sub...":
        "deepseek_v32",
    "DeepseekV4ForCausalLM on the meta device raised AttributeError: 'NoneType' object has no attrib...":
        "deepseek_v4",
    "model.layers.0.self_attn attends twice in one forward pass":
        "diffllama",
    "DogeForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attri...":
        "doge",
    "it was not tested: AmbiguousGlobalPerLayerAttributeError: 'num_attention_heads' is a per-layer ...":
        "dots3_note_text",
    "the mask of electra.encoder.layer.0.attention.self is not causal with one window: the query at ...":
        "electra",
    "the mask of ernie.encoder.layer.0.attention.self is not causal with one window: the query at 0 ...":
        "ernie",
    "transformers cannot create the model (KeyError: 'batch_manager_discovery')":
        "falcon gptj",
    "transformers rejects it as a configuration of type 'falcon_h1' (StrictDataclassFieldValidationE...":
        "falcon_h1",
    "no layer of FalconMambaForCausalLM calls transformers' attention interface":
        "falcon_mamba",
    "logits of Gemma3nForCausalLM through the engine's attention differ by up to 1.94 from its own, ...":
        "gemma3n_text",
    "it was not tested: AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute a...":
        "gemma4_text gemma4_unified_text",
    "GlmMoeDsaForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subsc...":
        "glm_moe_dsa",
    "it was not tested: no small model could be made: StrictDataclassClassValidationError: Class val...":
        "gpt_neo mamba2 zamba2 zaya",
    "GPTNeoXJapaneseForCausalLM on the meta device raised TypeError: unsupported operand type(s) for...":
        "gpt_neox_japanese",
    "transformers rejects it as a configuration of type 'granitemoehybrid' (StrictDataclassFieldVali...":
        "granitemoehybrid",
    "model.L_module.layers.0.self_attn attends twice in one forward pass":
        "hrm_text",
    "HYV4ForCausalLM on the meta device raised TypeError: 'MaskDescription' object is not subscriptable":
        "hy_v4",
    "model.layers.0.self_attn attends with position_bias":
        "inkling2_text inkling_text",
    "JetMoeForCausalLM on the meta device raised RuntimeError: split_with_sizes expects split_sizes ...":
        "jetmoe",
    "it was not tested: TypeError: 'NoneType' object is not subscriptable (modeling_lfm2_moe.py:472)":
        "lfm2_moe",
    "2 of 6 layers attend":
        "lfm3",
    "the mask of model.layers.0.self_attn is not causal with one window: it cannot be read: RuntimeE...":
        "llama4_text",
    "no layer of MambaForCausalLM calls transformers' attention interface":
        "mamba",
    "logits of MarianForCausalLM through the engine's attention differ by up to 2.23 from its own, w...":
        "marian",
    "logits of MBartForCausalLM through the engine's attention differ by up to 5.2 from its own, wit...":
        "mbart",
    "MegatronBertForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +:...":
        "megatron-bert",
    "(query heads, key heads, head size) are (4, 2, 16) in model.layers.0.self_attn and (4, 4, 16) i...":
        "mimo_v2_flash",
    "2 of 4 layers attend":
        "minimax",
    "MvpForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attrib...":
        "mvp",
    "transformers rejects it as a configuration of type 'nemotron_h' (StrictDataclassFieldValidation...":
        "nemotron_h",
    "1 of 4 layers attend":
        "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma",
    "no layer of OpenAIGPTLMHeadModel calls transformers' attention interface":
        "openai-gpt",
    "logits of PegasusForCausalLM through the engine's attention differ by up to 5.53 from its own, ...":
        "pegasus",
    "logits of PLBartForCausalLM through the engine's attention differ by up to 1.26 from its own, w...":
        "plbart",
    "add_cross_attention is True":
        "prophetnet",
    "it was not tested: TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType' (mo...":
        "qwen4_exp_text",
    "it was not tested: AssertionError: If you want to use `ReformerModelWithLMHead` make sure that ...":
        "reformer",
    "RemBertForCausalLM on the meta device raised RuntimeError: Attempting to broadcast a dimension ...":
        "rembert",
    "the mask of roberta_prelayernorm.encoder.layer.0.attention.self is not causal with one window: ...":
        "roberta-prelayernorm",
    "the mask of roc_bert.encoder.layer.0.attention.self is not causal with one window: the query at...":
        "roc_bert",
    "RoFormerForCausalLM on the meta device raised TypeError: unsupported operand type(s) for +: 'Te...":
        "roformer",
    "no layer of RwkvForCausalLM calls transformers' attention interface":
        "rwkv",
    "TrOCRForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attr...":
        "trocr",
    "max_position_embeddings is missing":
        "whisper",
    "XGLMForCausalLM on the meta device raised AttributeError: 'MaskDescription' object has no attri...":
        "xglm",
    "no layer of XLMWithLMHeadModel calls transformers' attention interface":
        "xlm",
    "max_position_embeddings is -1":
        "xlnet",
    "no layer of xLSTMForCausalLM calls transformers' attention interface":
        "xlstm",
    "XmodForCausalLM on the meta device raised ValueError: Input language unknown. Please call `Xmod...":
        "xmod",
    "it was not tested: ValueError: There is an issue with your definition of `tie_weights_keys` for...":
        "zamba",
}

PROVEN = {name: tuple(filter(None, kinds.split(", "))) for kinds, names in _PROVEN.items() for name in names.split()}
REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
