"""Compares the greedy tokens of a real GGUF model with those of transformers on the same weights.

    python examples/get_smollm2.py /tmp/smollm2
    python tests/campaigns/gguf_as_transformers.py --model /tmp/smollm2/.../SmolLM2-135M-Instruct.Q4_1.gguf

The engine gets 20 chats, or texts if the file has no chat template, with its defaults and in float32, and generates 48
tokens for each. The reference is the model that transformers reads from the file, in float32. Each token must have the
reference's largest logit for the tokens before it. A token whose logit is less than 1e-4 below the largest is a tie and
is counted separately. Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf
import torch
import transformers

from batch_manager.extras.chat_template import chat_prompt
from batch_manager.extras.gguf_tokenizer import load_gguf_chat
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
    """Return the model of the GGUF file at `path`, as transformers reads it, in float32."""
    folder, name = os.path.split(os.path.abspath(path))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager").eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a .gguf file")
    options = parser.parse_args()

    began = time.monotonic()
    with LLM(options.model) as llm:
        loaded, began = time.monotonic() - began, time.monotonic()
        prompts = [encode(llm.tokenizer, chat_prompt(options.model, [{"role": "user", "content": question}]),
                          add_special_tokens=False) if load_gguf_chat(options.model)[0] else
                   encode(llm.tokenizer, question) for question in QUESTIONS]
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
