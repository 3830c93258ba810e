"""EngineArguments and Callbacks: the one list of what GptManager, AsyncEngine and an engine process are given."""

import ast
import inspect
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

import batch_manager
from batch_manager import (
    GptManager,
    KvCacheConfig,
    ParallelConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.aio import AsyncEngine
from batch_manager.arguments import Callbacks, EngineArguments

OF_OTHER_VALUES = {
    "model_path": "folder", "model_type": TrtGptModelType.V1, "max_beam_width": 2,
    "scheduler_policy": SchedulerPolicy.MAX_UTILIZATION,
    "optional_params": TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.5)),
    "terminate_req_id": 0, "max_draft_tokens": 1, "exclude_input_in_output": True,
}
# Parameters of the public constructors that are neither values nor callbacks of the engine.
OTHERS = {GptManager.__init__: {"parts", "trt_engine_path"},
          AsyncEngine.start: {"parts", "takes_all", "process", "unknown"}}
# Files with a list of their own: public constructors, and a tool that calls GptManager as a host does.
LISTS = {"gpt_manager.py", "aio/engine.py", "testing/engine_harness.py", "tools/bench/engine.py"}


def parameters(function):
    return {name: parameter for name, parameter in inspect.signature(function).parameters.items()
            if name not in ("self", "cls")}


def names(values):
    return [member.name for member in fields(values)]


CALLBACKS = [name for name in names(Callbacks) if name != "alike"]      # which GptManager makes itself


def test_a_manager_takes_the_fields_of_the_two_lists_and_nothing_else_but_parts():
    taken = parameters(GptManager.__init__)
    assert set(taken) == {*names(EngineArguments), *CALLBACKS, *OTHERS[GptManager.__init__]}
    of_values = [name for name in taken if name in names(EngineArguments)]
    assert of_values == names(EngineArguments)              # in the same order
    assert [name for name in taken if name in CALLBACKS] == CALLBACKS
    made = EngineArguments()
    for name in ("model_path", "optional_params", "terminate_req_id", "exclude_input_in_output"):
        assert getattr(made, name) == taken[name].default


def test_an_async_engine_takes_some_of_them_with_the_defaults_of_the_lists():
    taken, made = parameters(AsyncEngine.start), EngineArguments()
    assert set(taken) - OTHERS[AsyncEngine.start] <= {*names(EngineArguments), *names(Callbacks)}
    for name in ("model_path", "model_type", "max_beam_width", "scheduler_policy"):
        assert getattr(made, name) == taken[name].default


def test_no_other_function_of_the_package_repeats_the_list():
    """A function with five of the names in its signature, or a call with five of them as keywords, is another list."""
    listed, found = {*names(EngineArguments), *names(Callbacks)}, set()
    package = Path(batch_manager.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if sum(name in text for name in listed) >= 5 else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
            elif isinstance(node, ast.Call):
                given = {keyword.arg for keyword in node.keywords}
            elif isinstance(node, ast.Dict):
                given = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            else:
                continue
            if len(given & listed) >= 5:
                found.add(path.relative_to(package).as_posix())
    assert found == LISTS


@pytest.mark.parametrize("name", names(EngineArguments))
def test_every_value_is_described(name):
    described, other = EngineArguments(**{name: OF_OTHER_VALUES[name]}).described(), EngineArguments().described()
    assert any(described[each] != other.get(each) for each in described)


def test_the_description_is_the_same_in_another_process_and_for_equal_values():
    arguments = EngineArguments(**OF_OTHER_VALUES)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).described())"
    other = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(arguments), capture_output=True, timeout=60)
    assert other.stdout.decode().strip() == str(arguments.described()), other.stderr.decode()
    assert replace(arguments, model_path=Path("folder")).described() == arguments.described()
    assert pickle.loads(pickle.dumps(arguments)) == arguments


def test_what_tells_ranks_apart_is_not_described():
    def described(limit=1, **options):
        config = ParallelConfig(**{"tensor_parallel_size": 2, **options})
        return EngineArguments(optional_params=TrtGptModelOptionalParams(
            max_queued_requests=limit, max_queued_tokens=limit, parallel_config=config)).described()

    assert described() == described(rank=1, local_rank=0, leader="here:1", device_ids=[1]) == described(limit=2)
    for other in ({"pipeline_parallel_size": 2}, {"collectives": "gloo"}, {"rank_timeout_s": 1}):
        assert described(**other) != described()


def test_parts_are_no_values():
    """A process gets the values alone; what a Parts holds may exist in one process only."""
    assert not {*names(EngineArguments)} & {"parts", *names(Parts)}
