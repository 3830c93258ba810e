"""Three texts of one model in the same steps: as it is, and with each of the two LoRA adapters in examples/adapters.

    python examples/many_adapters.py [--prompt TEXT] [--seed 3] [--max-tokens 120]

The model writes like Jane Austen. One adapter makes it write speeches of plays, the other entries of a dictionary. The
three requests share each step of the model: their rows are multiplied together, and each row gets the outputs of its
own adapter. `examples/train_adapters.py` trained the adapters, and the peft library wrote their folders.
"""

import argparse
import asyncio
import json
import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

try:
    from batch_manager.extras.async_llm import AsyncLLM
    from batch_manager.tools.standard_output import reported
except ImportError as error:
    sys.exit(f'many_adapters: {error.name} is not installed; pip install -e ".[examples]"')

EXAMPLES = Path(__file__).resolve().parent
ADAPTERS = {"plays": EXAMPLES / "adapters" / "plays", "definitions": EXAMPLES / "adapters" / "definitions"}
COLUMNS = (None, *ADAPTERS)


async def write(prompt: str, seed: int, max_tokens: int) -> None:
    scheduled = []                             # requests in each step

    def count(record: str) -> None:
        scheduled.append(json.loads(record)["Scheduled Requests"])

    async with await AsyncLLM.start(EXAMPLES / "models" / "austen-4m", adapters=ADAPTERS, return_stats=count) as llm:
        async def text(adapter: str | None) -> str:
            pieces = llm.stream(prompt, adapter=adapter, max_tokens=max_tokens, temperature=0.7, top_k=40, seed=seed)
            return prompt + "".join([piece async for piece in pieces])

        texts = await asyncio.gather(*map(text, COLUMNS))
    print(side_by_side(["no adapter", *ADAPTERS], texts))
    together = sum(number == len(COLUMNS) for number in scheduled)
    print(f"\n{sum(number > 0 for number in scheduled)} steps, {together} of them with all three requests")


def side_by_side(titles: list[str], texts: list[str]) -> str:
    """Return the texts in columns, each under its title."""
    width = (min(shutil.get_terminal_size((100, 24)).columns, 120) - 4) // len(texts)
    columns = [[title, "-" * len(title), *(line for paragraph in text.splitlines()
                                          for line in textwrap.wrap(paragraph, width) or [""])]
               for title, text in zip(titles, texts)]
    return "\n".join("  ".join(f"{line:<{width}}" for line in lines).rstrip()
                     for lines in zip_longest(*columns, fillvalue=""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="MARRIAGE", help="the beginning of all three texts")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=120)
    options = parser.parse_args()
    asyncio.run(write(options.prompt, options.seed, options.max_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(reported("many_adapters", main))
