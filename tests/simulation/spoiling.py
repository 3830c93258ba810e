"""What a backend may return that it must not: each makes a wrong output of a right one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from batch_manager.handover import BeamOutput, StepOutput


def with_a_wrong_token(beams: BeamOutput, token: int) -> BeamOutput:
    if not beams.hypotheses:
        return replace(beams, tokens=np.append(beams.tokens[:-1], np.int32(token)))
    *others, last = beams.hypotheses
    if not len(last.tokens):
        last = replace(last, log_probs=np.zeros(1, np.float32), rows=np.zeros(1, np.int32))
    return replace(beams, hypotheses=(*others, replace(last, tokens=np.append(last.tokens[:-1], np.int32(token)))))


def once(spoil: Callable[[StepOutput], StepOutput]) -> Callable[[StepOutput], StepOutput]:
    spoils = [spoil]
    return lambda output: spoils.pop()(output) if spoils else output


def one_row_too_few(output: StepOutput) -> StepOutput:
    if not len(output.slots):
        return one_row_too_many(output)
    return replace(output, slots=output.slots[:-1], tokens=output.tokens[:-1], finish=output.finish[:-1])


def one_token_too_few(output: StepOutput) -> StepOutput:
    if not len(output.slots):
        return one_row_too_many(output)
    return replace(output, tokens=output.tokens[:-1])


def one_row_too_many(output: StepOutput) -> StepOutput:
    return replace(output, slots=np.append(output.slots, np.int32(10**6)), tokens=np.append(output.tokens, 0),
                   finish=np.append(output.finish, 0))
