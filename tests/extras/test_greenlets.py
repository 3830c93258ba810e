"""gevent and eventlet: an engine whose threads would be greenlets is refused with the ways out, and these work."""

import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from batch_manager import ConfigError
from batch_manager.arguments import check_threads_are_real
from tests.harness.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
GUNICORN = ("-b", "127.0.0.1:PORT", "--pythonpath", f"{REPOSITORY},FOLDER", "host:app")
HOST = '''
import threading
from urllib.parse import parse_qs
from batch_manager import ConfigError, Parts
from batch_manager.extras.llm import LLM
from batch_manager.testing.scripted_backend import ScriptedBackend

script = lambda history: 300 + len(history) % 50
make = lambda: ScriptedBackend(vocab_size=4096, max_seq_len=60_000, num_blocks=20_000, script=script, verify=False,
                               step_seconds=0.005)
lock, llm = threading.Lock(), None

def app(environ, start_response):
    global llm
    if environ["PATH_INFO"] == "/ping":
        start_response("200 OK", [])
        return [b"pong"]
    try:
        with lock:
            llm = llm or LLM("examples/models/austen-4m", parts=Parts(backend=make))
    except ConfigError as error:
        start_response("503 Service Unavailable", [])
        return [str(error).encode()]
    pieces = llm.stream([5], max_tokens=50_000)    # minutes, if nobody leaves
    start_response("200 OK", [])
    return stream(pieces)

def stream(pieces):
    for piece in pieces:
        yield piece.encode()
'''
IN_GEVENTS_POOL = '''
from gevent import monkey, pywsgi
monkey.patch_all(thread=False)
import gevent, sys
exec(open(sys.argv[1]).read())

def stream(pieces):
    pool = gevent.get_hub().threadpool
    while (piece := pool.apply(next, (pieces, None))) is not None:
        yield piece.encode()

pywsgi.WSGIServer(("127.0.0.1", int(sys.argv[2])), app, log=None).serve_forever()
'''


@pytest.fixture
def serve(tmp_path):
    started = []

    def start(*command):
        (tmp_path / "host.py").write_text(HOST)
        port = free_port()
        command = [part.replace("PORT", str(port)).replace("FOLDER", str(tmp_path)) for part in command]
        started.append(subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL))
        address, give_up = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/ping", timeout=60).read()
                return address
            except OSError:
                assert time.monotonic() < give_up and started[-1].poll() is None
                time.sleep(0.05)

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def test_under_gunicorn_with_gevent_an_engine_is_refused(serve):
    pytest.importorskip("gevent")
    pytest.importorskip("gunicorn")
    address = serve("-m", "gunicorn", "-k", "gevent", *GUNICORN)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(address, timeout=60)
    assert raised.value.code == 503
    assert raised.value.read().decode().startswith("gevent has patched threading; ")


@pytest.mark.parametrize("command", [
    ("-m", "gunicorn", "-k", "gthread", "--threads", "4", "--preload", *GUNICORN),
    ("FOLDER/pool.py", "FOLDER/host.py", "PORT")], ids=["gunicorn -k gthread --preload", "patch_all(thread=False)"])
def test_the_ways_out_stream_while_other_connections_are_answered(serve, tmp_path, command):
    pytest.importorskip("gevent")
    pytest.importorskip("gunicorn")
    (tmp_path / "pool.py").write_text(IN_GEVENTS_POOL)
    address = serve(*command)
    with urllib.request.urlopen(address, timeout=60) as stream:
        for _ in range(11):                    # each piece is there before the next one is generated
            assert stream.read1(64) and urllib.request.urlopen(f"{address}/ping", timeout=60).read() == b"pong"


@pytest.mark.parametrize("module,asks", [("gevent.monkey", "is_module_patched"),
                                         ("eventlet.patcher", "is_monkey_patched")])
def test_only_patched_threads_are_refused(module, asks, monkeypatch):
    fake = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, fake)
    setattr(fake, asks, lambda name: False)
    check_threads_are_real()
    setattr(fake, asks, lambda name: name in ("threading", "thread"))
    with pytest.raises(ConfigError, match=f"{module.split('.')[0]} has patched threading; .*serve MODEL"):
        check_threads_are_real()
