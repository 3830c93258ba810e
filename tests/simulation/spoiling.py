"""Makes wrong step outputs of a backend from right ones."""

from dataclasses import replace

import numpy as np

from batch_manager.handover import StepOutput


def with_a_wrong_token(output: StepOutput, slot: int, token: int) -> StepOutput:
    """Return `output` with `token` as the last token of the slot's row, or of the slot's last hypothesis if it has any.

    If the slot has neither, `output` is returned.
    """
    rows = np.flatnonzero(output.slots == slot).tolist()
    if slot in output.hypotheses:
        *others, last = output.hypotheses[slot]
        if not len(last.tokens):
            last = replace(last, log_probs=np.zeros(1, np.float32), rows=np.zeros(1, np.int32))
        last = replace(last, tokens=np.append(last.tokens[:-1], np.int32(token)))
        return replace(output, hypotheses=output.hypotheses | {slot: (*others, last)})
    if not rows:
        return output
    tokens, finish = output.tokens.copy(), output.finish.copy()
    tokens[rows[0] if output.row_starts is None else output.row_starts[rows[0] + 1] - 1] = token
    finish[rows[0]] = 0
    return replace(output, tokens=tokens, finish=finish)


def one_row_too_few(output: StepOutput) -> StepOutput:
    if not len(output.slots):
        return one_row_too_many(output)
    return replace(output, slots=output.slots[:-1], finish=output.finish[:-1],
                   **({"tokens": output.tokens[:-1]} if output.row_starts is None
                      else {"row_starts": output.row_starts[:-1]}))


def one_token_too_few(output: StepOutput) -> StepOutput:
    if not len(output.tokens):
        return one_row_too_many(output)
    return replace(output, tokens=output.tokens[:-1])


def one_row_too_many(output: StepOutput) -> StepOutput:
    return replace(output, slots=np.append(output.slots, np.int32(10**6)), tokens=np.append(output.tokens, 0),
                   finish=np.append(output.finish, 0),
                   row_starts=None if output.row_starts is None else np.append(output.row_starts,
                                                                               output.row_starts[-1] + 1))
