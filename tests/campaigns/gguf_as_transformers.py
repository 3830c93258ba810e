"""Compares the greedy tokens of a real GGUF model with those of transformers on the same weights.

    python examples/get_smollm2.py /tmp/smollm2
    python tests/campaigns/gguf_as_transformers.py --model /tmp/smollm2/.../SmolLM2-135M-Instruct.Q4_1.gguf

The engine gets 20 chats, with its defaults and in float32, and generates 48 tokens for each. The reference is a
transformers Llama. The gguf library decodes its tensors, and this file reorders the rows of queries and keys without
product code. Each token must have the reference's largest logit for the tokens before it. A token whose logit is less
than 1e-4 below the largest is a tie and is counted separately. Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize

from batch_manager.extras.chat_template import chat_prompt
from batch_manager.extras.llm import LLM
from batch_manager.extras.tokenizer import encode
from batch_manager.names import FinishReason

TIE = 1e-4
TOKENS = 48
QUESTIONS = (
    "What is the capital of France?", "Write a haiku about the sea.", "Explain gravity to a child.",
    "List three uses of copper.", "Who wrote Pride and Prejudice?", "Translate 'good morning' into Spanish.",
    "What is 17 times 6?", "Give me a recipe for pancakes.", "Why is the sky blue?", "Write a function that adds two "
    "numbers in Python.", "Summarise the story of Romeo and Juliet.", "What do bees do in winter?",
    "Name a mammal that lays eggs.", "How does a bicycle stay upright?", "Write a short apology to a neighbour.",
    "What is the boiling point of water?", "Tell me a joke.", "What are prime numbers?",
    "Describe the colour red to somebody who cannot see.", "How many days are there in a leap year?",
)


def judge_of(path: str) -> torch.nn.Module:
    """Return a transformers Llama with the weights of the GGUF file at `path`, in float32."""
    reader = gguf.GGUFReader(path)

    def said(key):
        return reader.fields[f"llama.{key}"].contents()

    heads, keys = said("attention.head_count"), said("attention.head_count_kv")
    tensors = {tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
               for tensor in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]), hidden_size=said("embedding_length"),
        intermediate_size=said("feed_forward_length"), num_hidden_layers=said("block_count"), num_attention_heads=heads,
        num_key_value_heads=keys, max_position_embeddings=said("context_length"), rms_norm_eps=said(
            "attention.layer_norm_rms_epsilon"), rope_parameters={"rope_type": "default",
                                                                  "rope_theta": said("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stem, _, suffix = name.rpartition(".")
            found = tensors.pop(f"{names.get_name(stem)}.{suffix}").reshape(parameter.shape)
            if ".q_proj" in name or ".k_proj" in name:
                # a head's even rows become its first half, the odd rows its second
                of_heads = found.reshape(heads if ".q_proj" in name else keys, -1, found.shape[-1])
                found = torch.cat([of_heads[:, 0::2], of_heads[:, 1::2]], 1).reshape(found.shape)
            parameter.copy_(found)
    assert not tensors, tensors.keys()
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a .gguf file of a Llama with a chat template")
    options = parser.parse_args()

    began = time.monotonic()
    with LLM(options.model) as llm:
        loaded, began = time.monotonic() - began, time.monotonic()
        prompts = [encode(llm.tokenizer, chat_prompt(options.model, [{"role": "user", "content": question}]),
                          add_special_tokens=False) for question in QUESTIONS]
        completions = llm.generate(prompts, max_tokens=TOKENS, temperature=0)
        generated = time.monotonic() - began
    print(f"{os.path.basename(options.model)}: loaded in {loaded:.1f} s, generated in {generated:.1f} s")
    print(f"{QUESTIONS[0]} {completions[0].text!r}")

    end_id = gguf.GGUFReader(options.model).fields["tokenizer.ggml.eos_token_id"].contents()
    model, tokens, ends, ties, wrong, furthest = judge_of(options.model), 0, 0, 0, 0, 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.error is None, completion.error
        has_ended = completion.finish_reason is FinishReason.END_ID
        generated = [*completion.tokens, *([end_id] if has_ended else [])]
        assert len(completion.tokens) == TOKENS or has_ended
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *generated]])).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits, generated, strict=True):
            behind = float(row.max() - row[token])
            if int(row.argmax()) != token:
                ties, wrong = ties + (behind < TIE), wrong + (behind >= TIE)
            furthest = max(furthest, behind)
        tokens, ends = tokens + len(generated), ends + has_ended
    print(f"{len(prompts)} chats, {tokens} tokens, {ends} of them end ids; {ties} ties, {wrong} wrong; the furthest "
          f"behind the largest logit: {furthest:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
