"""Compares the responses to every item of a block with the verdict of the oracle."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .engines import Engine
from .items import NOBODY, Draw
from .oracle import Verdict


@dataclass(slots=True)
class Outcome:
    """The result of one block.

    wrong   (number of the request or None, description) of each violation of the rules in block.py
    """

    requests: int = 0
    run: int = 0
    refused: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    not_built: int = 0
    nobody: int = 0
    tokens: int = 0
    wrong: list[tuple[int | None, str]] = field(default_factory=list)
    slowest: float = 0.0
    largest: float = 0.0
    slow: list[int] = field(default_factory=list)


Answer = tuple[dict[str, Any], bool, str]        # tensors, whether the answer is final, error text


def check_items(engine: Engine, built: list[tuple[Draw, Verdict]], sent: Mapping[int, list[Answer]],
                companions: Collection[int], expected: Callable[..., list[int]], outcome: Outcome) -> None:
    """Compare the answers to all items of a block with the verdicts, and record the result in `outcome`.

    The engine got the items in one iteration, in the order of `built`, while the companions were running.

    sent       the answers that the engine sent for each id
    expected   returns the tokens that the backend generates, as ScriptedBackend.expected does
    """
    places = engine.max_num_sequences if engine.max_num_sequences > 0 else 1 << 30
    alive, room = set(companions), places - len(companions)
    waiting = waiting_tokens = 0
    of_id: dict[int, list[tuple[Draw, Verdict, set[str]]]] = defaultdict(list)
    for drawn, verdict in built:
        if drawn.kind is NOBODY:
            continue
        request_id, codes, length = verdict.request_id, set(verdict.codes), len(verdict.prompt)
        if request_id in alive:
            codes = {"DUPLICATE_REQUEST_ID"}
        elif not verdict.is_clear:
            was_refused = any("INVALID_REQUEST" in error for _, _, error in sent.get(request_id, ()))
            codes = {"INVALID_REQUEST"} if was_refused else set()
        elif not codes and room <= 0 and (waiting >= engine.max_queued_requests
                                          or waiting_tokens + length > engine.max_queued_tokens):
            codes = {"QUEUE_FULL"}
        if not codes:
            alive.add(request_id)
            if room <= 0:
                waiting, waiting_tokens = waiting + 1, waiting_tokens + length
            room -= 1
        of_id[request_id].append((drawn, verdict, codes))

    for request_id in sent.keys() - of_id.keys() - set(companions):
        outcome.wrong.append((None, f"{request_id} was answered, and nobody has that id"))
    for request_id, items in of_id.items():
        _check_answers(engine, items, list(sent.get(request_id, ())), expected, outcome)


def _code_of(error: str) -> str:
    return error[1:].split("]")[0] if error.startswith("[") else ""


def _check_answers(engine: Engine, items: list[tuple[Draw, Verdict, set[str]]], answers: list[Answer],
                   expected: Callable[..., list[int]], outcome: Outcome) -> None:
    """Compare all answers for one id with the verdicts on the items with this id.

    A duplicate is answered while the first request with its id still runs, so the answers of several items may be
    mixed. The check assigns answers to items by their content: refusals come in the order of the items, and all other
    answers belong to one request.
    """
    refusals = [answer for answer in answers if answer[2] and not _ended_later(answer[2])]
    rest = [answer for answer in answers if not (answer[2] and not _ended_later(answer[2]))]
    for drawn, verdict, codes in items:
        if codes:
            if not refusals:
                outcome.wrong.append((drawn.number, f"is not refused; it should be, with {codes}: {verdict.faults}"))
                continue
            tensors, final, error = refusals.pop(0)
            code = _code_of(error)
            outcome.refused[code] += 1
            if code not in codes:
                outcome.wrong.append((drawn.number, f"is refused with {code} instead of {codes}: {error}"))
            elif tensors or not final or not error.isprintable() or len(error) > 2000:
                outcome.wrong.append((drawn.number, f"its refusal is not one: {final}, {tensors.keys()}, {error!r}"))
            elif code == "INVALID_REQUEST" and verdict.faults and not (
                    "one of its values raised" in error or any(name in error for name in verdict.faults)):
                outcome.wrong.append((drawn.number, f"is refused for another reason than {verdict.faults}: {error}"))
            continue
        if not rest:
            texts = [error for _, _, error in answers]
            outcome.wrong.append((drawn.number, f"is refused, and nothing is wrong with it: {texts}"))
            continue
        outcome.run += 1
        problem = _problem_of_run(engine, verdict, rest, expected, outcome)
        if problem:
            outcome.wrong.append((drawn.number, problem))
        rest = []
    if rest or refusals:
        outcome.wrong.append((items[-1][0].number, f"{len(rest) + len(refusals)} answers too many"))


def _ended_later(error: str) -> bool:
    return _code_of(error) in ("MODEL_ERROR", "DEADLINE")


def _problem_of_run(engine: Engine, verdict: Verdict, answers: list[Answer], expected: Callable[..., list[int]],
                    outcome: Outcome) -> str:
    """Return a description of what is wrong with the answers to a request that ran, or "" if they are right."""
    if [final for _, final, _ in answers] != [False] * (len(answers) - 1) + [True]:
        return f"finals: {[final for _, final, _ in answers]}"
    tensors, _, error = answers[-1]
    prompt = verdict.prompt
    if error:
        codes = {"MODEL_ERROR"} if verdict.fails_later else {"DEADLINE"} if verdict.may_expire else set()
        return "" if _code_of(error) in codes else f"ended with {error}"
    streams = verdict.is_streaming and not engine.is_static
    if not streams and len(answers) > 1:
        return "several responses, and it does not stream"
    skipped = 0 if verdict.is_streaming or engine.exclude_input else len(prompt)
    if verdict.beam_width > 1:
        rows = tensors["output_ids"][0]
        good = len(rows) == verdict.beam_width and all(row[:skipped].tolist() == prompt[:skipped] for row in rows)
        return "" if good else f"beams of another prompt: {rows.tolist()}"
    told = [token for tensors, _, _ in answers for token in tensors["output_ids"][0, 0].tolist()]
    wanted = expected(prompt, verdict.count, end_id=verdict.end_id, random_seed=verdict.seed)
    outcome.tokens += len(wanted)
    reason = int(tensors["finish_reason"][0, 0])
    if verdict.may_expire:
        return "" if told[skipped:] == wanted[:len(told) - skipped] else f"told {told}, not a beginning of {wanted}"
    if told != prompt[:skipped] + wanted:
        return f"told {told}, expected {prompt[:skipped] + wanted}"
    if reason != (3 if len(wanted) == verdict.count else 1):
        return f"finish_reason {reason} after {len(wanted)} of {verdict.count} tokens"
    return ""
