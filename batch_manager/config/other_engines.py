"""Options of other engines that users pass here, and what to pass instead."""

# An option of vLLM, transformers, llama.cpp or TensorRT-LLM -> what to pass here.
OPTIONS_OF_OTHER_ENGINES = {
    "gpu_memory_utilization": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "kv_cache_memory_bytes": "kv_cache_config=KvCacheConfig(max_tokens=...)",
    "num_gpu_blocks_override": "kv_cache_config=KvCacheConfig(max_tokens=...)",
    "block_size": "kv_cache_config=KvCacheConfig(tokens_per_block=...)",
    "enable_prefix_caching": "kv_cache_config=KvCacheConfig(enable_block_reuse=...)",
    "swap_space": "kv_cache_config=KvCacheConfig(host_cache_size=...)",
    "max_model_len": "max_seq_len=...",
    "context_length": "max_seq_len=...",
    "num_ctx": "max_seq_len=...",
    "mem_fraction_static": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "n_ctx": "max_seq_len=...",
    "max_num_seqs": "max_batch_size=...",
    "max_num_batched_tokens": "max_num_tokens=...",
    "enable_chunked_prefill": "enable_chunked_context=...",
    "enforce_eager": "cuda_graphs=False, cpu_compile=False",
    "torch_dtype": "dtype=...",
    "device_map": "device=...",
    "n_threads": "num_threads=...",
    "model_impl": "model_implementation=...",
    "load_in_8bit": 'quantization="int8"',
    "load_in_4bit": 'quantization="int4"',
    **dict.fromkeys(("speculative_model", "draft_model"),
                    'speculative_config=SpeculativeConfig("draft_model", model=...)'),
    "tp_size": "parallel_config=ParallelConfig(tensor_parallel_size=...)",
    "pp_size": "parallel_config=ParallelConfig(pipeline_parallel_size=...)",
}
# An option of other engines without a counterpart -> what happens here.
_ONE_DEVICE = "a process has one device, device=...; parallel_config=ParallelConfig(...) runs a model on several"
_IN_THE_CALL = "it is an option of each call, for example LLM.generate(prompts, {}=...)"
NOT_HERE = {
    **dict.fromkeys(("tensor_split", "main_gpu", "n_gpu_layers", "world_size"), _ONE_DEVICE),
    **dict.fromkeys(("data_parallel_size", "dp_size"), "start an engine for each replica"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "repetition_penalty"),
                    _IN_THE_CALL),
    "quantization_config": 'it is read from the checkpoint; quantization="int8" or "int4" quantises a plain one',
    **dict.fromkeys(("trust_remote_code", "attn_implementation", "tokenizer_mode"),
                    "code of a checkpoint never runs, and the engine has its own attention and tokenizers"),
    **dict.fromkeys(("revision", "download_dir", "tokenizer_revision"),
                    "models are not downloaded; `hf download NAME --revision REVISION` prints the path to pass"),
    **dict.fromkeys(("enable_thinking", "chat_template_kwargs"),
                    "a variable of the chat template: LLM.chat(messages, template_options={'enable_thinking': ...})"),
    "served_model_name": "`batch-manager serve` has --served-model-name",
}
