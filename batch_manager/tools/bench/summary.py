"""Results as text: a table, gptManagerBenchmark's lines, and its CSV."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...errors import counted
from .metrics import LATENCIES, NAMES, Bounds

Result = Mapping[str, Any]

# figure here -> (name, unit) in gptManagerBenchmark, in the order of gptManagerBenchmark
LATENCY_NAMES = {"e2e": ("sequence_latency", "ms"), "ttft": ("time_to_first_token", "ms"),
                 "tpot": ("inter_token_latency", "ms"), "queue": ("request_queueing_latency", "ms")}
USER_RATE = ("user_tokens_per_second", "tokens/sec/user")
ORDER = ("avg", "max", "min", "p99", "p90", "p50")


def original_figures(result: Result) -> dict[str, float | int | None]:
    """Return the figures of a run under gptManagerBenchmark's names, which include the units. None: unknown.

    The figure `token_throughput` counts requested tokens.
    """
    found: dict[str, float | int | None] = {
        "num_samples": result["n"],
        "num_error_samples": result["failed"],
        "total_latency(ms)": round(result["wall_s"] * 1e3, 3),
        "seq_throughput(seq/sec)": result["requests_s"],
        "token_throughput(token/sec)": result["requested_tok_s"],
    }
    summaries = [(*name, result["latency_ms"][figure]) for figure, name in LATENCY_NAMES.items()]
    for name, unit, values in [*summaries, (*USER_RATE, result["user_tok_s"])]:
        found |= {f"{which}_{name}({unit})": None if values is None else values[which] for which in ORDER}
    return found


def lines(results: Sequence[Result]) -> str:
    """Format runs as lines "[BENCHMARK] name value", with one block per run. Unknown figures are left out."""
    blocks = []
    for result in results:
        named = [("swept", value) for value in [load_words(result)] if len(results) > 1]
        blocks.append("\n".join(f"[BENCHMARK] {name} {value}" for name, value
                                in [*named, *original_figures(result).items()] if value is not None))
    return "\n\n".join(blocks)


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Return a header row and one row per run. Cells of unknown figures are empty."""
    figures = [original_figures(result) for result in results]
    swept = [["request_rate", "concurrency"]] if len(results) > 1 else [[]]
    rows = [[*swept[0], *figures[0]]]
    for result, values in zip(results, figures, strict=True):
        rows.append([*(result[name] for name in swept[0]), *values.values()])
    return [["" if cell is None else cell for cell in row] for row in rows]


def load_words(result: Result) -> str:
    """Describe how the requests arrived."""
    if not result["request_rate"]:
        if result["concurrency"] is not None:
            return f"concurrency {result['concurrency']}"
        is_recorded = result["request_rate"] is None and result["mode"] == "online"
        return "arrival times of the workload" if is_recorded else "all at once"
    kind = {"exponential": " (Poisson)", "constant": " (constant)"}.get(result.get("delays"), "")
    limit = "" if result["concurrency"] is None else f", at most {result['concurrency']} in progress"
    return f"{result['request_rate']:g} requests/s{kind}{limit}"


def table(result: Result) -> str:
    """Format one run as a table."""
    failed = f", {result['failed']} failed" if result["failed"] else ""
    of = f" of {counted(result['sessions'], 'session')}" if result.get("sessions") else ""
    out = [f"{counted(result['n'], 'request')}{of}{failed}, {load_words(result)}: {result['wall_s']:.2f} s, "
           f"{counted(result['steps'] or 0, 'iteration')}",
           f"prompt tokens {result['prompt_tokens']:,}, generated tokens {result['output_tokens']:,}", "",
           *aligned([["requests/s", number(result["requests_s"])],
                     ["generated tokens/s", number(result["output_tok_s"])],
                     ["all tokens/s", number(result["total_tok_s"])],
                     *goodput_rows(result)]), ""]
    titles = {"ttft": "time to first token", "itl": "between tokens", "tpot": "mean of one request",
              "e2e": "end to end", "queue": "in the queue"}
    rows = [["", *NAMES]]
    rows += [[f"{titles[name]}, ms", *(number(values[which]) for which in NAMES)]
             for name in LATENCIES if (values := result["latency_ms"][name])]
    if result["user_tok_s"]:
        rows.append(["tokens/s of one user", *(number(result["user_tok_s"][which]) for which in NAMES)])
    out += aligned(rows)
    if result.get("drafts"):
        out += ["", *(line for rows in draft_rows(result["drafts"]) for line in aligned(rows))]
    if result.get("turns"):
        out += ["", *aligned(turn_rows(result["turns"]))]
    return "\n".join(out)


def draft_rows(drafts: Mapping[str, Any]) -> list[list[list[str]]]:
    """Return two tables: the drafts, and the share of steps with drafts that accepted one at each place."""
    sequences, accepted_at = drafts["sequences"], drafts["accepted_at"]
    steps = max(sequences, 1)
    return [[["drafts", f"{drafts['tokens']:,}"], ["accepted", f"{sum(accepted_at):,}"],
             ["tokens of a sequence in a step with drafts", number(1 + sum(accepted_at) / steps)],
             *([["other outputs than without drafts", f"{drafts['different_outputs']:,}"]]
               if "different_outputs" in drafts else [])],
            [["accepted at place", *(str(place) for place in range(1, len(accepted_at) + 1))],
             ["  share", *(f"{count / steps:.0%}" for count in accepted_at)]]]


def turn_rows(turns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["turn", "requests", "failed", "tokens of a prompt", "ttft p50, ms", "p99", "e2e p50, ms", "p99"]]
    for turn in turns:
        latencies = [turn["latency_ms"][name] for name in ("ttft", "e2e")]
        rows.append([str(turn["turn"]), str(turn["n"]), str(turn["failed"]), number(turn["prompt_tokens"] / turn["n"]),
                     *(number(of and of[which]) for of in latencies for which in ("p50", "p99"))])
    return rows


def goodput_rows(result: Result) -> list[list[str]]:
    goodput = result["goodput"]
    if goodput is None:
        return []
    bounds = Bounds(*(goodput[field.name] for field in fields(Bounds)))
    return [[f"within bounds, requests/s ({bounds.words()})", number(goodput["requests_s"])],
            ["within bounds, share", f"{goodput['share']:.1%}"]]


def sweep_table(results: Sequence[Result]) -> str:
    """Format several runs as a table, one row each."""
    has_goodput = any(result["goodput"] for result in results)
    rows = [["load", "requests/s", "tokens/s", "ttft p50", "p99", "itl p50", "p99", "e2e p50", "p99", "failed",
             *(["good/s", "share"] if has_goodput else [])]]
    rows += [[load_words(result), number(result["requests_s"]), number(result["output_tok_s"]),
              *(number(result[f"{name}_ms_{which}"]) for name in ("ttft", "itl", "e2e") for which in ("p50", "p99")),
              str(result["failed"]),
              *([number(result["goodput"]["requests_s"]), f"{result['goodput']['share']:.1%}"] if has_goodput else [])]
             for result in results]
    return "\n".join([*aligned(rows), "", "ttft, itl and e2e in milliseconds"])


def number(value: float | None) -> str:
    """Format a number with two decimals below 10, one below 100, and none from 100 on. None becomes a dash."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines. The first column is left-aligned, and all other columns are right-aligned."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
