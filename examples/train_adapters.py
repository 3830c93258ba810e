"""Train the two LoRA adapters of examples/adapters for the model in examples/models/austen-4m.

One learns to write speeches of plays, from Shakespeare, and one entries of a dictionary, from Ambrose Bierce's "The
Devil's Dictionary". The peft library makes the adapters and writes their folders (pip install peft transformers).

    python examples/train_adapters.py --output /tmp/adapters --cpu-minutes 8

A quick check that everything works:

    python examples/train_adapters.py --output /tmp/smoke --max-steps 2
"""

import argparse
import lzma
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from train_tiny_model import EXAMPLES, WindowSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = EXAMPLES / "models" / "austen-4m"
TEXTS = {"plays": "plays.txt.xz", "definitions": "definitions.txt.xz"}
MODULES = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_passages(name):
    """Return (training passages, held-out passages): one passage in fifty is held out."""
    passages = lzma.decompress((EXAMPLES / "data" / TEXTS[name]).read_bytes()).decode().strip().split("\n\n\n")
    return [passage for index, passage in enumerate(passages) if index % 50 != 25], passages[25::50]


@torch.no_grad()
def bits_per_byte(model, tokenizer, passages):
    """Return the loss on the passages in bits per byte of text."""
    nats = 0.0
    for passage in passages:
        tokens = torch.tensor([tokenizer.encode(passage)])
        nats += F.cross_entropy(model(tokens).logits[0, :-1].float(), tokens[0, 1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(passage.encode()) for passage in passages)


def train(name, arguments):
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    training, held_out = read_passages(name)
    before = bits_per_byte(base, tokenizer, held_out)
    end = tokenizer.eos_token_id
    sampler = WindowSampler([torch.tensor([*tokenizer.encode(passage), end]) for passage in training], arguments.seed)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, lora_dropout=0.05,
                                            task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], weight_decay=0.01)
    start, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        rate = arguments.learning_rate * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = sampler.batch(8, 256)
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        seconds = time.process_time() - start
        progress = max(seconds / (60 * arguments.cpu_minutes), step / arguments.max_steps)
        if step % 50 == 0:
            print(f"{name}: step {step}  {progress:.0%}  loss {loss.item():.3f}  {seconds:.0f} s CPU", flush=True)
    model.eval()
    for parameter in model.parameters():
        if parameter.requires_grad:                   # bfloat16, as the base model's weights
            parameter.data = parameter.data.to(torch.bfloat16).float()
    after = bits_per_byte(model, tokenizer, held_out)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "austen-4m"
    model.save_pretrained(arguments.output / name, save_embedding_layers=False)     # it asks the hub otherwise
    (arguments.output / name / "README.md").unlink(missing_ok=True)
    print(f"{name}: {step} steps, {seconds:.0f} s CPU, held-out bits per byte {before:.3f} without the adapter, "
          f"{after:.3f} with it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--only", choices=TEXTS, help="train only this adapter")
    parser.add_argument("--cpu-minutes", type=float, default=8, help="processor time for each adapter")
    parser.add_argument("--max-steps", type=float, default=math.inf, help="stop after this many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in [arguments.only] if arguments.only else TEXTS:
        train(name, arguments)


if __name__ == "__main__":
    main()
