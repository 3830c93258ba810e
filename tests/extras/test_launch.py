"""Programs of several ranks: how one starts itself again under torchrun, and which process follows."""

import sys
from types import SimpleNamespace

import pytest

from batch_manager import ConfigError, TrtGptModelOptionalParams
from batch_manager.extras import launch
from batch_manager.parallel.mapping import LAUNCHERS
from batch_manager.tools import serve


@pytest.fixture
def replaced(monkeypatch):
    """The arguments of the programs that replaced this one, and no launcher's variables."""
    calls = []
    for launcher in LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    monkeypatch.setattr(launch.os, "execve", lambda path, argv, environment: calls.append((path, argv, environment)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(9)))
    return calls


@pytest.mark.parametrize("spec, program", [
    (None, ["serve.py"]), (SimpleNamespace(name="batch_manager.tools.__main__"), ["-m", "batch_manager.tools"])])
def test_a_program_without_a_launcher_is_started_again_by_torchrun(replaced, monkeypatch, spec, program):
    monkeypatch.setattr(sys, "argv", ["serve.py", "MODEL", "--port", "0"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    launch.parallel_config(2, 2)
    (path, argv, environment), = replaced
    assert path == sys.executable and argv == [
        path, "-m", "batch_manager.extras.launch", "--standalone", "--nproc-per-node", "4", *program, "MODEL", "--port",
        "0"]
    assert environment["OMP_NUM_THREADS"] == "9" and environment["PATH"]


def test_one_rank_and_a_launched_process_stay(replaced, monkeypatch):
    assert launch.parallel_config() is None and launch.rank_of(None) == 0
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    config = launch.parallel_config(tensor_parallel_size=2)
    assert config.num_ranks == 2 and launch.rank_of(config) == 1 and not replaced
    config = launch.parallel_config(pipeline_parallel_size=3)       # torchrun runs, with another number
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2; expected 3"):
        launch.rank_of(config)
    assert not replaced


@pytest.mark.parametrize("failure, status", [("", 0), ("[ENGINE_FAILED] rank 0 has closed its connection", 1)])
def test_a_follower_ends_with_1_if_the_engine_failed(monkeypatch, failure, status):
    """The state of an engine that has ended is STOPPED."""
    manager = SimpleNamespace(wait_until_terminate=lambda: True,
                              health=lambda: {"state": "STOPPED", "failure": failure})
    monkeypatch.setattr(launch, "GptManager", lambda **arguments: manager)
    assert launch.follow("model", TrtGptModelOptionalParams()) == status


def test_a_server_of_several_ranks_drains_before_torchrun_ends_it(replaced, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(["MODEL", "--tensor-parallel-size", "2", "--drain-seconds", "25.5"])
    assert ended.value.code == 2 and not replaced
    assert "--drain-seconds is 25.5 with several ranks; expected at most 25, because" in capsys.readouterr().err
