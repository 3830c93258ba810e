"""Programs of several ranks: rank 0 serves, the others follow. No further library is needed.

    config = parallel_config(tensor_parallel_size=2)        # starts the program again, twice, if no launcher did
    params = TrtGptModelOptionalParams(parallel_config=config)
    if rank_of(config) > 0:
        sys.exit(follow(model, params))
    llm = LLM(model, parallel_config=config)
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ..arguments import EngineArguments, by_name
from ..config import ParallelConfig, TrtGptModelOptionalParams
from ..gpt_manager import GptManager
from ..parallel.mapping import is_launched, place_of

__all__ = ["LONGEST_DRAIN_S", "follow", "parallel_config", "rank_of"]

LONGEST_DRAIN_S = 25    # torchrun kills its processes 30 seconds after SIGTERM


def parallel_config(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> ParallelConfig | None:
    """Return the configuration of this process; None for one rank.

    If no launcher started this process, it is replaced by torchrun, which starts the same program once for each rank on
    this machine. Call the function early: everything before it runs again. Raises ConfigError.
    """
    config = ParallelConfig(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    if config.num_ranks == 1:
        return None
    if not is_launched(config):
        main = getattr(sys.modules["__main__"], "__spec__", None)    # set by `python -m`
        program = sys.argv[:1] if main is None else ["-m", main.name.removesuffix(".__main__")]
        # torchrun would give each process one thread. Engines on a CPU divide the number by that of the ranks.
        threads = str(len(os.sched_getaffinity(0)))
        os.execve(sys.executable, [sys.executable, "-m", __name__, "--standalone", "--nproc-per-node",
                                   str(config.num_ranks), *program, *sys.argv[1:]],
                  {"OMP_NUM_THREADS": threads, **os.environ})
    return config


def rank_of(config: ParallelConfig | None) -> int:
    """Return the rank of this process. Raises ConfigError."""
    return 0 if config is None or config.num_ranks == 1 else place_of(config).rank


def follow(model_path: str | os.PathLike[str], optional_params: TrtGptModelOptionalParams, **values: Any) -> int:
    """Take part as another rank than 0 until the engine ends, and return an exit status: 1 if it failed, else 0.

    Once the engine runs, SIGINT and SIGTERM, which launchers send to every rank, are left to rank 0.

    values   other arguments of GptManager, if rank 0 does not have those of AsyncEngine and LLM
    Raises   the errors of the constructor of GptManager
    """
    arguments = EngineArguments(model_path=model_path, optional_params=optional_params,
                                **{"exclude_input_in_output": True, **values})
    manager = GptManager(**by_name(arguments), get_inference_requests_cb=None, send_response_cb=None)
    with ExitStack() as stack:
        with suppress(ValueError):                       # only a main thread gets signals, and may ignore them
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        manager.wait_until_terminate()
        return int(bool(manager.health()["failure"]))


def main(arguments: Sequence[str]) -> int:
    """Run torchrun, and return an exit status as the program itself would: torchrun has 1 and a traceback for each end.

    arguments   those of torchrun
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        return max(error.get_first_failure()[1].exitcode, 1)     # that of a killed process is below 0
    except SignalException as error:                             # the processes had it too, and have ended
        return 0 if error.sigval is signal.SIGTERM else 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
