"""C14, C17, C18: how a process with a manager, and a fork of the process, can end. Each test runs a process."""

import subprocess
import sys
import textwrap

import pytest

from tests.contract.test_process_level import FINALS, PREAMBLE


def run(body: str, seconds: float = 120.0) -> subprocess.CompletedProcess:
    script = textwrap.dedent(PREAMBLE) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds)


def lines(result) -> set[str]:
    return set(result.stdout.split("\n")) - {""}


@pytest.mark.parametrize(("leave", "status"), [("sys.exit(5)", 5), ("pass", 6)])
def test_c17_c18_a_forked_child_may_leave_the_with_block_it_was_forked_in(leave, status):
    result = run(f"""
        with manager:
            child = os.fork()
            if child == 0:
                {leave}
            else:
                _, status = os.waitpid(child, 0)
                os.write(1, f"status {{os.waitstatus_to_exitcode(status)}}\\n".encode())
                sys.exit(3)
        sys.exit(6)
        """)
    assert result.returncode == 3, result.stderr
    assert lines(result) == FINALS | {f"status {status}"}
    assert "ManagerClosedError" not in result.stderr


@pytest.mark.parametrize(("leave", "status"), [("sys.exit(5)", 5), ("1 / 0", 1)])
def test_c18_a_child_forked_inside_a_callback_answers_nobody_and_ends_where_it_leaves_it(leave, status):
    """A child that is forked in a callback sends no response and ends when it leaves the callback."""
    result = run(f"""
        manager.shutdown(drain=False)
        pending = [InferenceRequest(i, {{"input_ids": [1], "request_output_len": 5}}) for i in range(10, 13)]
        parent, forked = os.getpid(), []

        def stats(record):
            if not forked:
                forked.append(os.fork())
                if forked[0] == 0:
                    try:
                        manager.health()
                    except ManagerClosedError:
                        os.write(1, b"inert\\n")
                    {leave}
                else:
                    _, status = os.waitpid(forked[0], 0)
                    os.write(1, f"status {{os.waitstatus_to_exitcode(status)}}\\n".encode())

        manager = make(return_batch_manager_stats_cb=stats, terminate_req_id=99)
        while manager.num_active_requests or not forked:
            time.sleep(0.001)
        assert manager.shutdown()
        """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("final 1") == 1 + 3, "of 1, 10, 11 and 12, each from the parent alone"
    assert lines(result) == FINALS | {"final 10 ", "final 11 ", "final 12 ", "inert", f"status {status}"}


def test_c18_a_forked_child_may_make_a_manager_of_its_own():
    result = run("""
        while manager.health()["iterations"] < 3:    # a fork does not wait for imports of another thread
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            pending = [InferenceRequest(20, {"input_ids": [1], "request_output_len": 3})]
            with make() as own:
                while own.health()["final_responses"] < 1:
                    time.sleep(0.001)
            sys.exit(4)
        _, status = os.waitpid(child, 0)
        os.write(1, f"status {os.waitstatus_to_exitcode(status)}\\n".encode())
        """)
    assert result.returncode == 0, result.stderr
    assert lines(result) == FINALS | {"final 20 ", "status 4"}


def test_c17_while_the_interpreter_exits_no_manager_can_be_made_that_would_hold_it_up():
    """The constructor refuses to make a manager while the interpreter exits."""
    result = run("""
        import atexit
        kept = []

        def late(where):
            try:
                kept.append(make())
            except ManagerClosedError as error:
                os.write(1, f"{where} {str(error)[:26]}\\n".encode())

        def after_the_main_thread():
            threading.main_thread().join()
            while manager.health()["state"] != "STOPPED":
                time.sleep(0.001)
            late("thread")

        class Finalized:
            def __del__(self, late=late):
                late("finalizer")

        threading.Thread(target=after_the_main_thread).start()
        atexit.register(late, "atexit")
        finalized = Finalized()
        """)
    assert result.returncode == 0, result.stderr
    assert lines(result) == FINALS | {
        f"{where} the interpreter is exiting" for where in ("thread", "atexit", "finalizer")}


@pytest.mark.parametrize("waiting", ["manager.shutdown(timeout=float('inf'))", "manager.wait_until_terminate()",
                                     "manager.__exit__(None, None, None)"])
@pytest.mark.parametrize("then", ["assert manager.shutdown(timeout=0)", "pass"])
def test_c14_c17_an_interrupt_of_who_waits_for_the_worker_costs_no_final(waiting, then):
    """An interrupt of a thread that waits for the worker loses no final response."""
    result = run(f"""
        import signal
        try:
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
            {waiting}
        except KeyboardInterrupt:
            os.write(1, b"interrupted\\n")
        {then}
        """)
    assert result.returncode == 0, result.stderr
    assert lines(result) == FINALS | {"interrupted"}


def test_c17_c18_signal_handlers_of_the_host_stay_and_may_exit():
    result = run("""
        import signal
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(9))
        with manager:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        """)
    assert result.returncode == 9
    assert lines(result) == FINALS


def test_c17_a_cycle_that_holds_the_manager_is_collected_and_aborts():
    result = run("""
        import gc
        class Server:
            pass
        server = Server()
        server.manager, server.itself = manager, server
        del manager, server
        gc.collect()
        while len(threading.enumerate()) > 1:
            time.sleep(0.001)
        os.write(1, b"before the exit\\n")
        """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("before the exit\n")
    assert lines(result) == FINALS | {"before the exit"}
