"""The matrix: what holds for each pair of features of tests/matrix/features.py.

    python -m tests.matrix.pairs > docs/combinations.md

    =   every request gets what it gets alone, and both features take effect in one request
    -   the same, but one of the two is off, and a warning or the statistics say so
    r   refused by name, with a way out; the other requests get what they get alone
"""

from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from .features import FEATURES

ORDER = "CRPWNBGALVTYKSDQF"
TABLE = """
      C  R  P  W  N  B  G  A  L  V  T  Y  K  S  D  Q  F
  C   =  =  =  =  =  =  =  =  =  r  =  =  =  =  =  =  =
  R      =  =  =  -  =  =  =  =  -  =  =  =  =  =  =  =
  P         =  =  =  =  =  =  =  -  =  =  =  =  =  =  =
  W            =  =  =  =  =  =  =  =  =  =  =  =  =  =
  N               =  =  =  =  =  =  =  =  -  =  r  =  =
  B                  =  r  =  =  =  =  =  =  -  =  =  =
  G                     =  =  =  =  =  =  =  =  =  =  =
  A                        =  =  r  =  r  =  =  =  =  =
  L                           =  r  =  =  =  =  =  =  =
  V                              =  r  r  -  r  r  =  =
  T                                 =  =  r  =  r  r  =
  Y                                    =  r  =  r  r  =
  K                                     =  =  =  =  =
  S                                           =  =  =  =
  D                                             =  =  =
  Q                                                =  =
  F                                                   =
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the mark of a pair is not `=`, or what to know about a `=`.

    off       for `-`: the letter of the feature that is off
    says      for `r`, and for `-` with a warning: the text that a user sees; `...` stands for any text
    missing   for `-` without a warning: the key that the statistics then lack
    of_request   for `-`: the feature is off in requests with both alone, and only the documentation says so
    """

    text: str
    off: str = ""
    says: str = ""
    missing: str = ""
    of_request: bool = False


REASONS: dict[str, Reason] = {
    "CV": Reason("a static batch computes whole prompts", says=(
        "enable_chunked_context is set with TrtGptModelType.V1; all prompts of a batch are computed in one step; "
        "leave it out, or use InflightFusedBatching")),
    "RN": Reason("reuse is off: every prompt is computed in full", off="R", says=(
        "KvCacheConfig.enable_block_reuse is switched off: with sink tokens every prompt is computed in full")),
    "RV": Reason("reuse is off: every prompt is computed in full", off="R", says=(
        "KvCacheConfig.enable_block_reuse is switched off: TrtGptModelType.V1 computes every prompt in full")),
    "PV": Reason("the members of a static batch are never paused; the statistics have no `Paused Requests`", off="P",
                 missing="Paused Requests"),
    "WA": Reason("run-ahead is off, with a warning, if the pool holds the window of a request, but not the token more "
                 "that running ahead needs"),
    "NA": Reason("as with a window"),
    "BG": Reason("the request is refused", says=(
        "request ... has ... beams; guided decoding supports one; set beam_width to 1")),
    "BA": Reason("requests with beams run in every second step"),
    "GA": Reason("requests with a grammar run in every second step"),
    "RL": Reason("blocks are reused among requests of adapters with the same content"),
    "LV": Reason("a padded batch has no adapters", says=(
        "peft_cache_config is set with TrtGptModelType.V1; a padded batch has no adapters; leave it out, or use "
        "InflightFusedBatching")),
    "AV": Reason("V1 runs in lockstep", says=(
        "run_ahead is True; TrtGptModelType.V1 runs one static batch in lockstep; leave run_ahead out, or use "
        "InflightFusedBatching")),
    "AY": Reason("the stages already overlap steps", says=(
        "run_ahead is True, and parallel_config has 2 ranks; the stages already work at several micro-batches at a "
        "time; leave run_ahead out")),
    **dict.fromkeys(("VT", "VY"), Reason("ranks do not pad", says=(
        "TrtGptModelType.V1 is set, and parallel_config has 2 ranks; their steps are compiled or packed; use "
        "InflightFusedBatching"))),
    "NK": Reason("as with block reuse", off="K", says=(
        "KvCacheConfig.enable_block_reuse is switched off: with sink tokens every prompt is computed in full")),
    "BK": Reason("of requests with beams, the blocks of the prompt are saved"),
    "VK": Reason("as with block reuse", off="K", says=(
        "KvCacheConfig.enable_block_reuse is switched off: TrtGptModelType.V1 computes every prompt in full")),
    "ND": Reason("sinks reuse nothing", says=(
        "kv_transfer_config is set, and KvCacheConfig has sink_token_length=...; only reusable blocks are handed over; "
        "set enable_block_reuse, without sink tokens")),
    "VD": Reason("a static batch reuses nothing", says=(
        "kv_transfer_config is set with TrtGptModelType.V1; a padded batch has no reusable blocks; leave it out, or "
        "use InflightFusedBatching")),
    **dict.fromkeys(("TD", "YD"), Reason("no rank has whole blocks", says=(
        "kv_transfer_config is set, and parallel_config has 2 ranks; each rank has a part of every block; leave "
        "kv_transfer_config out"))),
    **dict.fromkeys(("TK", "YK"), Reason("no rank has whole blocks", says=(
        "disk_cache_path is set, and parallel_config has 2 ranks; each rank has a part of every block; leave "
        "disk_cache_path out"))),
    "BS": Reason("requests with beams get no drafts", off="S", of_request=True),
    "AS": Reason("a request runs ahead while it has no drafts"),
    "VS": Reason("a static batch yields one token of each request in a step", says=(
        "speculative_config is set with TrtGptModelType.V1; a step of a static batch yields one token of each request; "
        "leave it out, or use InflightFusedBatching")),
    **dict.fromkeys(("TQ", "YQ"), Reason("ranks read parts of matrices as numbers", says=(
        "quantization is set, and parallel_config has 2 ranks; each rank reads its part of a matrix as numbers; leave "
        "quantization out"))),
    "KQ": Reason("blocks are of the same weights, quantised in the same way"),
}


def marks() -> dict[str, str]:
    """Return pair -> mark. A pair is two letters in the order of `ORDER`; two equal ones are the feature alone."""
    _, *rows = TABLE.strip("\n").splitlines()
    found: dict[str, str] = {}
    for index, row in enumerate(rows):
        letter, *cells = row.split()
        found |= {letter + column: mark for column, mark in zip(ORDER[index:], cells, strict=True)}
    return found


MARKS = marks()


def all_pairs() -> list[str]:
    """Every pair of features, in order."""
    return ["".join(pair) for pair in combinations_with_replacement(FEATURES, 2)]


def is_equal(letters: str) -> bool:
    """Whether each two of these features have the mark `=`."""
    return all(MARKS[one + other] == "=" for one, other in combinations(letters, 2))


def mixtures(size: int) -> list[str]:
    """All sets of `size` features that have `=` with each other."""
    return [letters for letters in map("".join, combinations(ORDER, size)) if is_equal(letters)]


PAGE = """\
# What works together

Each feature with each other, {pairs} pairs. [A test](../tests/matrix/test_matrix.py) runs every pair, on the scripted
model and on small models of Llama and Gemma 3; those with the disk cache, another engine, quantised weights, an FP8
cache or several ranks, on Llama. With Gemma 3, the campaign alone runs the pairs with run-ahead, grammars and adapters.
Blocks of prompts from disk or another engine meet features of scheduling on the scripted model alone. Ranks are 2 and 4
processes. This page is printed from its table. A cell is a pair, or a feature alone.

{marks}

{table}

*Alone* is an engine that runs one request at a time, with the window, the sinks, the beams and the grammar that the
request asks for, and none of the others. Options that are no capability are drawn at random for each run: both
policies, both chunking policies, block sizes, compiled steps, overlap, one or two calls a step, host blocks, partial
reuse, `deterministic`, streams, priorities, cache salts, sampling parameters, end ids and stop words, prompt tables
and returned values. In each run, one request is stopped and one fails. [Campaign T20](contract.md#suites) also
combines three features and more.

{reasons}
"""


def table(*rows: tuple[str, ...]) -> str:
    """Return a table of Markdown. The first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def page() -> str:
    """Return docs/combinations.md."""
    cells = [(f"**{letter}** [{feature.name}]({feature.page})",
              *(f"`{MARKS[letter + column]}`" if letter + column in MARKS else "" for column in ORDER))
             for letter, feature in FEATURES.items()]
    reasons = [(f"{FEATURES[one].name}, {FEATURES[other].name}", f"`{MARKS[one + other]}`", reason.text, reason.says)
               for (one, other), reason in REASONS.items()]
    return PAGE.format(
        pairs=len(MARKS) - len(FEATURES),
        marks=table(("mark", "meaning", "what the test demands"), (
            "`=`", "equal to alone",
            "Every request gets the tokens, log-probabilities, logits and finish reasons that it gets alone, bit by "
            "bit or within rounding. Both features take effect in one request."), (
            "`-`", "one of the two is off", "The same, and a warning or the statistics say which one is off. "
            "If it is off in requests with both alone, the documentation says so."), (
            "`r`", "refused",
            "The text names what is wrong and a way out. The other requests get what they get alone.")),
        table=table(("", *ORDER), *cells),
        reasons=table(("pair", "mark", "", "text"), *reasons))


if __name__ == "__main__":
    print(page(), end="")
