"""Chat with a model in the terminal, with its chat template.

    python examples/get_smollm2.py && python examples/chat.py          # SmolLM2-135M-Instruct
    python examples/chat.py FOLDER                                     # any chat model: a folder, or a .gguf file
    git diff | python examples/chat.py --prompt - --system "Summarise this."      # one answer only

Each turn sends the whole conversation. The engine does not recompute tokens that are still in the KV cache. The
line after each answer shows the number of these tokens. Ctrl-C stops an answer. Needs: pip install -e ".[text,gguf]"
"""

import argparse
import contextlib
import json
import os
import sys
from collections import deque
from pathlib import Path

from get_smollm2 import smollm2_path

from batch_manager import STATISTICS, BatchManagerError, FinishReason, KvCacheConfig
from batch_manager.extras.llm import LLM, Completion
from batch_manager.extras.text import chat_prompt
from batch_manager.extras.tokenizer import encode
from batch_manager.tools.standard_output import reported

HELP = """/regenerate   answer the last question again, with another seed
/reset        start a new conversation
/stats        show the engine's statistics of the last iteration
/help         show this list
Ctrl-C stops an answer; at the prompt, Ctrl-C and Ctrl-D exit"""


class Conversation:
    """A conversation with the model. Its messages include no question that the engine refused."""

    def __init__(self, llm: LLM, model: str | Path, system: str | None, sampling: dict) -> None:
        self.llm, self.model, self.sampling = llm, model, sampling
        self.beginning = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages, self.turns = self.beginning, []

    def ask(self, text: str) -> Completion:
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def ask_again(self) -> Completion | None:
        """Answer the last question again. Returns None if there is no question yet."""
        if self.messages == self.beginning:
            return None
        if self.sampling["seed"] is not None:
            self.sampling = {**self.sampling, "seed": self.sampling["seed"] + 1}
        return self._answer(self.messages[:-1])

    def _answer(self, messages: list[dict]) -> Completion:
        """Print the answer as it arrives. If Ctrl-C stops the answer, its first part stays in the conversation."""
        text, ids = self._prompt(messages)
        pieces = self.llm.stream(ids, **self.sampling)
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pieces.cancel()
            print(" [stopped]", end="")
        print()
        done = pieces.completion
        self.messages = [*messages, {"role": "assistant", "content": done.text}]
        self.turns.append((text + done.text, ids + done.tokens))
        return done

    def _prompt(self, messages: list[dict]) -> tuple[str, list[int]]:
        """Return the prompt as text and tokens.

        Earlier turns keep their original tokens, because encoding their text again may give other tokens, which are not
        cached.
        """
        text = chat_prompt(self.model, messages)
        known, ids = next(((known, ids) for known, ids in reversed(self.turns) if text.startswith(known)), ("", []))
        return text, ids + encode(self.llm.tokenizer, text[len(known):], add_special_tokens=False)


def figures(done: Completion) -> str:
    """Return the timings and token counts of an answer, in one line."""
    timings, num_tokens = done.timings, len(done.tokens)
    parts = [f"{num_tokens} tokens"]
    if timings.first_token_s is not None:
        parts.append(f"first after {timings.first_token_s:.2f} s")
        if num_tokens > 1 and timings.total_s > timings.first_token_s:
            parts.append(f"then {(num_tokens - 1) / (timings.total_s - timings.first_token_s):.0f} tokens/s")
    if done.cached_tokens is not None:
        parts.append(f"{done.cached_tokens} of {done.prompt_tokens} tokens of the conversation were in the cache")
    if done.finish_reason is FinishReason.LENGTH:
        parts.append("cut off by length")
    return f"[{', '.join(parts)}]"


def statistics(records: deque) -> str:
    if not records:
        return "no iteration has run yet"
    record = json.loads(records[-1])
    return "\n".join(f"{each.name:32} {record[each.name]:>13,} {each.unit}, {each.time}" for each in STATISTICS
                     if type(record.get(each.name)) is int and record[each.name])


def talk(conversation: Conversation, records: deque) -> None:
    """Read and carry out questions and commands, until the end of the input or Ctrl-C."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return print()
        try:
            if line == "/regenerate":
                done = conversation.ask_again()
                print("there is no question yet" if done is None else figures(done))
            elif line == "/reset":
                conversation.reset()
            elif line == "/stats":
                print(statistics(records))
            elif line.startswith("/"):
                print(HELP)
            elif line:
                print(figures(conversation.ask(line)))
        except BatchManagerError as error:
            print(f"chat: {error}", file=sys.stderr)
        except KeyboardInterrupt:                  # Ctrl-C just after the end of an answer
            print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or .gguf file; default: the download of get_smollm2.py")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument("--prompt", metavar="TEXT", help="answer one question and exit; -: read it from stdin")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of an answer (512)")
    parser.add_argument("--temperature", type=float, default=0.5, help="0: greedy (0.5)")
    parser.add_argument("--top-p", type=float, default=0.9,
                        help="sample from the likeliest tokens with this total probability (0.9)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: all (0)")
    parser.add_argument("--seed", type=int, help="for repeatable answers")
    parser.add_argument("--device", help="such as cpu or cuda:0")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and activations: float32, bfloat16, ...")
    parser.add_argument("--no-block-reuse", action="store_true", help="compute the whole conversation in each turn")
    parser.add_argument("--disk-cache-path", metavar="FOLDER",
                        help="keep what was computed in this folder, so that it is not computed again tomorrow")
    parser.add_argument("--disk-cache-size", type=int, default=4 << 30, metavar="BYTES",
                        help="most bytes of it (4 GiB)")
    options = parser.parse_args()
    model = options.model or smollm2_path()
    if model is None:
        print("chat: there is no model; expected a folder or .gguf file; pass one, or download the default model: "
              f"python {Path(__file__).with_name('get_smollm2.py')}", file=sys.stderr)
        return 1
    if sys.stdin is None:                                         # `<&-` or a service manager closed it
        sys.stdin = open(os.devnull)
    sys.stdin.reconfigure(errors="replace")                       # a diff may contain bytes that are not text
    question = options.prompt
    if question == "-":
        question = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if question is not None and not question.strip():
        print("chat: the prompt is empty; expected a question; pass it after --prompt, or on stdin with --prompt -",
              file=sys.stderr)
        return 1
    records: deque = deque(maxlen=1)
    try:
        chat_prompt(model, [{"role": "user", "content": "Hello"}])    # to fail early if there is no template
        llm = LLM(model, return_stats=records.append, max_batch_size=1, device=options.device, dtype=options.dtype,
                  enable_chunked_context=True, max_num_tokens=512,    # short steps: Ctrl-C waits for the end of a step
                  kv_cache_config=KvCacheConfig(
                      enable_block_reuse=not options.no_block_reuse, disk_cache_path=options.disk_cache_path,
                      disk_cache_size=None if options.disk_cache_path is None else options.disk_cache_size))
    except BatchManagerError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    sampling = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    with llm:
        conversation = Conversation(llm, model, options.system, sampling)
        if question is not None:
            try:
                for piece in llm.stream([*conversation.messages, {"role": "user", "content": question}], **sampling):
                    print(piece, end="", flush=True)
                print(flush=True)
            except BatchManagerError as error:
                print(f"chat: {error}", file=sys.stderr)
                return 1
            return 0
        print(f"{Path(model).name}, {llm.info.dtype} on {llm.info.device}. /help lists the commands.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401    arrow keys and a history in input()
        talk(conversation, records)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(reported("chat", main))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
