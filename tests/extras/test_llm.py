"""LLM returns completions in the order of the prompts, even if some fail.

Interrupting or closing an LLM ends its requests. Dropping all references to it ends its engine.
"""

import asyncio
import gc
import json
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from batch_manager import (
    ConfigError,
    ErrorCode,
    FinishReason,
    InvalidRequestError,
    KvCacheConfig,
    ManagerClosedError,
    Parts,
)
from batch_manager.testing.scripted_backend import ScriptedBackend

tokenizers = pytest.importorskip("tokenizers")

from batch_manager.extras.llm import LLM, RequestFailed  # noqa: E402
from batch_manager.extras.sampling import Sampling  # noqa: E402
from tests.harness.waiting import until  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def scripted(script=None, *, folder=MODEL, step_seconds=0.0, return_stats=None, **params):
    params = {"max_batch_size": 4, **params}
    backend = ScriptedBackend(vocab_size=4096, max_seq_len=60_000, num_blocks=20_000, script=script,
                              step_seconds=step_seconds, verify=False)
    return LLM(folder, parts=Parts(backend=backend), return_stats=return_stats, **params)


def saying(text, prompt_length=1):
    """Return a script for the scripted model: after a prompt of `prompt_length` tokens, it repeats `text`."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    return lambda history: tokens[(len(history) - prompt_length) % len(tokens)]


def until_idle(llm):
    deadline = time.monotonic() + 30
    while len(llm._switchboard) or llm._manager.num_active_requests:
        assert time.monotonic() < deadline, "requests are still alive"
        time.sleep(0.002)


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name == "batch_manager worker"]


def test_completions_come_in_order_and_a_bad_prompt_costs_itself():
    prompts = [[n % 4000] for n in range(300)]
    prompts[7], prompts[8], prompts[50] = [10**6], 3, []
    with scripted() as llm:
        backend = llm._manager._loop.backend
        completions = llm.generate(iter(prompts), max_tokens=4, temperature=0, ignore_eos=True)
        assert len(completions) == 300
        for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if n in (7, 8, 50):
                assert completion.error.code is ErrorCode.INVALID_REQUEST and not completion.tokens
                assert completion.finish_reason is FinishReason.NOT_FINISHED
            else:
                assert completion.error is None
                assert completion.tokens == backend.expected(prompt, 4)
                assert completion.finish_reason is FinishReason.LENGTH
                assert 0 < completion.timings.first_token_s <= completion.timings.total_s
        assert completions[8].timings is None and "a prompt is of type int" in str(completions[8].error)
        until_idle(llm)


def test_a_text_is_one_prompt_and_seeds_are_fresh_unless_given():
    with LLM(MODEL, num_threads=1) as llm:
        prompt = "It is a truth universally acknowledged"
        (one,) = llm.generate(prompt, max_tokens=12, seed=5)
        assert one.error is None and 0 < len(one.tokens) <= 12
        assert prompt + one.text == TOKENIZER.decode([*TOKENIZER.encode(prompt).ids, *one.tokens])
        again = llm.generate([prompt, prompt], max_tokens=12, seed=5)
        assert [each.text for each in again] == [one.text] * 2
        fresh = {completion.text for completion in llm.generate([prompt] * 6, max_tokens=12)}
        assert len(fresh) > 1
        greedy = {completion.text for completion in llm.generate([prompt] * 3, max_tokens=12, temperature=0)}
        assert len(greedy) == 1
        (scored,) = llm.generate(prompt, max_tokens=12, seed=5, log_probs=True)
        assert scored.tokens == one.tokens and len(scored.log_probs) == len(scored.tokens)
        assert all(value < 0 for value in scored.log_probs) and scored.top_log_probs == []
        (scored,) = llm.generate(prompt, max_tokens=12, seed=5, log_probs=True, top_log_probs=2, raw_log_probs=True)
        assert scored.tokens == one.tokens
        for token, value, likeliest in zip(scored.tokens, scored.log_probs, scored.top_log_probs, strict=True):
            assert len(likeliest) == 2 and likeliest.get(token, value) == value <= max(likeliest.values())
        with pytest.raises(TypeError, match="did you mean max_tokens"):
            llm.generate(prompt, max_token=3)


def test_a_model_that_is_not_there_is_said_to_be_a_folder():
    with pytest.raises(ConfigError, match="there is no folder 'openai-community/gpt2'; .*; .*hf download"):
        LLM("openai-community/gpt2")


def test_a_stop_string_ends_the_text_and_the_request():
    with scripted(saying("We walked to the village and then home again.")) as llm:
        whole, cut = (llm.generate([[5]], max_tokens=40, stop=stop)[0] for stop in ((), ["village"]))
        assert whole.finish_reason is FinishReason.LENGTH and len(whole.tokens) == 40
        assert cut.text == "We walked to the " and cut.finish_reason is FinishReason.STOP_WORDS
        assert cut.tokens == whole.tokens[: len(cut.tokens)] and "village" in TOKENIZER.decode(cut.tokens)
        assert [llm.generate([[5]], max_tokens=9000, stop="village")[0].tokens for _ in range(3)] == [cut.tokens] * 3
        until_idle(llm)


@pytest.mark.parametrize("stop", ["</s>", ["village</s>", "nothing"]])
def test_a_special_token_as_a_stop_string_ends_the_text_as_its_id_does(stop):
    with scripted(saying("We walked to the village</s> and home again.")) as llm:
        cut, streamed = llm.generate([[5]], max_tokens=40, stop=stop)[0], llm.stream([5], max_tokens=40, stop=stop)
        by_id = llm.generate([[5]], max_tokens=40, stop_token_ids=[TOKENIZER.token_to_id("</s>")])[0]
        assert by_id.text == "We walked to the village"
        assert cut.text == "".join(streamed) == (by_id.text if stop == "</s>" else "We walked to the ")
        assert cut.finish_reason is FinishReason.STOP_WORDS and cut.tokens[:-1] == by_id.tokens
        assert streamed.completion.finish_reason is FinishReason.STOP_WORDS
        until_idle(llm)


def test_pieces_are_the_text_and_leaving_the_loop_stops_the_request():
    with scripted(saying("Emma smiled, and said nothing more. "), step_seconds=0.001) as llm:
        (whole,) = llm.generate([[5]], max_tokens=30)
        pieces = llm.stream([5], max_tokens=30)
        assert "".join(pieces) == whole.text == pieces.completion.text
        assert pieces.completion.tokens == whole.tokens and list(pieces) == []
        for n, _ in enumerate(llm.stream([5], max_tokens=9000)):
            if n == 3:
                break
        until_idle(llm)
        pieces = llm.stream([5], max_tokens=9000)
        next(pieces)
        pieces.cancel()
        assert list(pieces) == [] and pieces.completion.finish_reason is FinishReason.CANCELLED
        assert pieces.completion.text and pieces.completion.tokens
        until_idle(llm)
        for wrong, says in (({"temperature": -1}, "temperature is -1"), ({"max_tokens": 0}, "max_tokens"),
                            ({"deadline_s": -1}, "deadline_s"), ({"min_p": 2}, "min_p"), ({"seed": "x"}, "seed"),
                            ({"speculation": "no"}, "speculation")):
            with pytest.raises(RequestFailed, match=says) as raised:
                llm.stream([5], **wrong)              # at the call, before a web framework has sent its status
            assert raised.value.code is ErrorCode.INVALID_REQUEST
        for prompt in ([10**6], [], [5] * 60_000):
            with pytest.raises(RequestFailed, match="the prompt"):
                llm.stream(prompt)
        with pytest.raises(InvalidRequestError, match="a prompt is of type dict"):
            llm.stream({"role": "user"})


def test_threads_that_wait_for_one_text_end_with_it_and_when_another_one_cancels():
    with scripted(step_seconds=0.002) as llm:
        for new_tokens, cancels in ((40, False), (50_000, True)):
            pieces, read, threads = llm.stream([5], max_tokens=new_tokens, ignore_eos=True), [], []
            for _ in range(3):
                threads.append(threading.Thread(target=read.extend, args=(pieces,), daemon=True))
                threads[-1].start()
            if cancels:
                until(lambda read=read: read)
                pieces.cancel()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
            given, whole = sum(map(len, read)), len(pieces.completion.text)
            assert 0 < given <= whole and (cancels or given == whole)
            assert pieces.completion.finish_reason is (FinishReason.CANCELLED if cancels else FinishReason.LENGTH)
            assert list(pieces) == [] == list(pieces)
        until_idle(llm)


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="the tokenizer is of type int"):
        LLM(MODEL, tokenizer=5)
    with pytest.raises(ConfigError, match="the folder of the tokenizer is of type NoneType"):
        LLM(None)


def test_options_of_a_wrong_type_are_named():
    with scripted() as llm:
        for options, told in (({"stop_token_ids": 5}, "stop_token_ids is of type int; expected a list"),
                              ({"logit_bias": [1]}, "logit_bias is of type list; expected a mapping")):
            assert told in str(llm.generate(["a"], **options)[0].error)
        for stop, told in ((5, "stop is of type int; expected a string, a list of strings, or None"),
                           (b"x", "stop is of type bytes"), ({"a": 1}, "stop is of type dict"),
                           ("", "contains an empty string"), ([5], "contains a value of type int")):
            with pytest.raises(InvalidRequestError, match=told):
                llm.generate(["a"], stop=stop)
        for name, told in (("max_completion_tokens", "did you mean max_tokens"), ("length_penalty", "beam search"),
                           ("enable_thinking", "template_options"), ("n", "once for each output"),
                           ("do_sample", "temperature=0 is greedy"), ("stop_strings", r"did you mean stop\?")):
            with pytest.raises(TypeError, match=told):
                llm.generate(["a"], **{name: 5})
        with pytest.raises(InvalidRequestError, match="messages is empty; expected at least one message"):
            llm.chat([])
        assert len(llm.generate([[1]], stop=None, stop_token_ids=None, max_tokens=3, ignore_eos=True)[0].tokens) == 3


def test_ctrl_c_stops_what_runs_and_leaves_it_usable():
    with scripted(step_seconds=0.002) as llm:
        for call in (lambda: llm.generate([[n] for n in range(50)], max_tokens=50_000),
                     lambda: list(llm.stream([3], max_tokens=50_000))):
            def interrupt():
                until(lambda: llm.health()["active_requests"] != 0)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            interrupter = threading.Thread(target=interrupt)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                interrupter.start()
                call()
            assert time.monotonic() - began < 50             # the texts take 100 s
            interrupter.join(60)
            until_idle(llm)
            assert [len(each.tokens) for each in llm.generate([[1], [2]], max_tokens=3, ignore_eos=True)] == [3, 3]


def test_ctrl_c_while_a_stream_is_handed_over_stops_it():
    with scripted(step_seconds=0.002) as llm:
        def interrupted():
            del llm._manager.notify
            llm._manager.notify()
            raise KeyboardInterrupt

        llm._manager.notify = interrupted
        with pytest.raises(KeyboardInterrupt) as kept:       # as a notebook keeps it, with its frames
            llm.stream([3], max_tokens=50_000)
        until_idle(llm)
        assert kept.value.__traceback__ is not None


def test_what_the_iterator_of_prompts_raises_stops_what_runs():
    def prompts():
        yield from ([1], [2])
        raise LookupError("no more prompts")

    with scripted(step_seconds=0.001) as llm:
        with pytest.raises(LookupError):
            llm.generate(prompts(), max_tokens=50_000)
        until_idle(llm)


def test_it_works_under_a_running_event_loop_and_on_threads():
    with scripted() as llm:
        async def cell():
            return llm.generate([[1], [2]], max_tokens=3, temperature=0)

        from_cell = [each.tokens for each in asyncio.run(cell())]
        on_threads = {}

        def work(n):
            on_threads[n] = [each.tokens for each in llm.generate([[1], [2]] * 20, max_tokens=3, temperature=0)]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(on_threads[n] == from_cell * 20 for n in range(4))


def test_a_cell_that_is_run_again_leaves_one_engine():
    before = len(worker_threads())
    for _ in range(10):
        llm = scripted()
        assert llm.generate([[1]], max_tokens=2)
    gc.collect()
    deadline = time.monotonic() + 30
    while len(worker_threads()) > before + 1:
        assert time.monotonic() < deadline, worker_threads()
        time.sleep(0.01)
    assert len(llm.generate([[1]] * 3, max_tokens=2)) == 3
    del llm
    gc.collect()
    while len(worker_threads()) > before:
        assert time.monotonic() < deadline, worker_threads()
        time.sleep(0.01)


def test_prompts_that_wait_have_priorities_and_deadlines_and_no_limit_unless_one_is_given():
    order = []

    def ask(llm, name, **options):
        completion = llm.generate([[5]], max_tokens=2, ignore_eos=True, **options)[0]
        order.append(name)
        return completion

    with scripted(step_seconds=0.01, max_batch_size=1) as llm, ThreadPoolExecutor(8) as pool:
        long = llm.stream([3], max_tokens=50_000, ignore_eos=True)
        next(long)
        late = pool.submit(ask, llm, "late", deadline_s=0.05)
        assert late.result(30).error.code is ErrorCode.DEADLINE
        waiting = []
        for name, priority in (("a", 0.1), ("b", 0.1), ("c", 0.9), ("d", 1.0)):
            waiting.append(pool.submit(ask, llm, name, priority=priority))
            until(lambda: llm._manager.num_active_requests >= 1 + len(waiting))
        long.cancel()
        assert not any(future.result(30).error for future in waiting) and order == ["late", "d", "c", "a", "b"]
        late = llm.generate([[n] for n in range(40)], max_tokens=20, deadline_s=0.3, ignore_eos=True)
        assert not late[0].error and late[-1].error.code is ErrorCode.DEADLINE and late[-1].timings.total_s < 0.3
    with scripted(step_seconds=0.01, max_batch_size=1, max_queued_requests=0) as llm:
        errors = [completion.error for completion in llm.generate([[5], [6]], max_tokens=20, ignore_eos=True)]
        assert errors[0] is None and errors[1].code is ErrorCode.QUEUE_FULL


def test_close_ends_what_waits_and_then_refuses():
    has_begun = threading.Event()                            # the text of prompt [0]

    def script(history):
        if history[0] == 0 and len(history) > 10:
            has_begun.set()
        return 300

    llm = scripted(script, step_seconds=0.002)
    pieces = llm.stream([3], max_tokens=50_000)
    next(pieces)
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([[n] for n in range(30)], max_tokens=50_000)))
    thread.start()
    assert has_begun.wait(30)
    assert llm.close()
    thread.join(30)
    assert len(answers) == 30 and {each.error.code for each in answers} == {ErrorCode.SHUTDOWN}
    assert answers[0].tokens and answers[0].text
    with pytest.raises(RequestFailed, match="SHUTDOWN"):
        list(pieces)
    for call in (llm.generate, llm.stream):
        with pytest.raises(ManagerClosedError, match="LLM is closed"):
            call("more")
    assert llm.close()


def test_a_chat_goes_through_the_template_of_the_folder(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "Who is Emma?"}]
    prompt = TOKENIZER.encode("user: Who is Emma?\nassistant:", add_special_tokens=False).ids
    with scripted(saying(" a friend", len(prompt)), folder=folder) as llm:
        backend_said = llm.chat(messages, max_tokens=2, temperature=0)
        assert backend_said.error is None and " a friend".startswith(backend_said.text) and backend_said.text
        assert "".join(llm.stream(messages, max_tokens=2, temperature=0)) == backend_said.text
        first, second = ({"type": "text", "text": text} for text in ("Who is ", "Emma?"))
        in_parts = [{"role": "user", "content": [first, second]}]
        assert llm.chat(in_parts, max_tokens=2, temperature=0).text == backend_said.text
        assert "".join(llm.stream(in_parts, max_tokens=2, temperature=0)) == backend_said.text
        for part, name in (({"type": "image"}, "type"), ({**second, "txt": "?"}, "txt"), ({"type": "text"}, "text")):
            with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.content\[1\]\.{name}: "):
                llm.chat([{"role": "user", "content": [first, part]}])
        with pytest.raises(InvalidRequestError, match="messages"):
            llm.chat("Who is Emma?")
        with pytest.raises(InvalidRequestError, match="1 tool has no effect"):
            llm.chat(messages, tools=[{"type": "function", "function": {"name": "add"}}])
    with scripted() as llm, pytest.raises(ConfigError, match="no chat template"):
        llm.chat(messages)


def test_a_folder_without_a_tokenizer_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    before = len(worker_threads())
    with pytest.raises(ConfigError, match="tokenizer.json"):
        LLM(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM(tmp_path)
    assert len(worker_threads()) == before


def test_the_five_lines_of_the_readme(monkeypatch, capsys):
    repository = MODEL.parents[2]
    monkeypatch.chdir(repository)
    readme = (repository / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(from batch_manager.extras.llm import LLM\n.*?)^```$", readme, re.M | re.S)
    assert len([line for line in block.splitlines() if line]) == 4
    names = {}
    exec(block, names)
    assert len(capsys.readouterr().out.split()) > 20
    names["llm"].close()


def test_options_become_tensors():
    with scripted() as llm:
        info = llm.info
    given = Sampling(max_tokens=None, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=3, stop_token_ids=[7],
                     min_tokens=2, repetition_penalty=1.2, log_probs=True, top_log_probs=4, raw_log_probs=True,
                     logit_bias={5: -100, 6: 2.5}, deadline_s=3, speculation=False)
    assert given.request_options == {"priority": 0.5, "deadline_s": 3, "speculation": False}
    tensors = given.tensors([1, 2, 3], info)
    bias = tensors.pop("embedding_bias")
    assert (bias[5], bias[6], bias.sum(), len(bias)) == (-100, 2.5, -97.5, 4096)
    assert tensors == {
        "input_ids": [1, 2, 3], "request_output_len": info.max_seq_len - 3, "temperature": 0.5, "random_seed": 3,
        "runtime_top_p": 0.9, "runtime_top_k": 0, "end_id": [7], "runtime_min_p": 0.1, "min_length": 2,
        "repetition_penalty": 1.2, "return_log_probs": True, "return_top_log_probs": 4, "raw_log_probs": True}
    assert Sampling(top_p=0).tensors([1], info)["runtime_top_k"] == 1
    assert len({Sampling().tensors([1], info)["random_seed"] for _ in range(4)}) == 4
    for bias in ({4096: 1}, {"5": 1}, {5: 101}, {5: float("nan")}):
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            Sampling(logit_bias=bias).tensors([1], info)


def test_options_and_prompts_take_the_integers_of_numpy():
    with scripted() as llm:
        info = llm.info
        plain, numpy = (llm.generate([prompt], max_tokens=length, temperature=0, stop_token_ids=ends)[0]
                        for prompt, length, ends in (([5, 6], 3, [7]),
                                                     ([np.int64(5), np.int32(6)], np.int64(3), np.array([7]))))
    assert plain.error is None and plain.tokens == numpy.tokens
    tensors = Sampling(stop_token_ids=[np.int64(7)], logit_bias={np.int64(5): np.float32(2.5)}).tensors([1], info)
    assert type(tensors["end_id"][0]) is int and tensors["embedding_bias"][5] == 2.5


@pytest.mark.parametrize("options, says", [
    ({"max_tokens": 0}, "max_tokens is 0; it must be"), ({"max_tokens": "5"}, "max_tokens is of type str"),
    ({"top_p": 2.0}, "top_p is 2.0"), ({"top_k": -5}, "top_k is -5; expected at least 1, or 0 or -1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"seed": 2**70}, "seed is"), ({"min_tokens": -1}, "min_tokens is -1"),
    ({"ignore_eos": "no"}, "ignore_eos is of type str"), ({"ignore_eos": 1}, "ignore_eos is of type int"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens is 6; expected at most max_tokens, which is 5"),
    ({"log_probs": 5}, "log_probs is 5"), ({"top_log_probs": 99}, "top_log_probs is 99"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids is 1000000000"),
    ({"stop_token_ids": ["</s>"]}, "stop_token_ids has a value of type str"),
    ({"stop_token_ids": range(9)}, "stop_token_ids and the checkpoint's end ids are 9")])
def test_errors_name_the_options_and_not_the_tensors(options, says):
    with scripted() as llm:
        error = llm.generate([[5]], **options)[0].error.message
        assert says in error and not any(name in error for name in ("runtime_", "end_id", "output_len", "random_"))
        assert "the prompt holds an id outside 0..4095" in llm.generate([[10**6]])[0].error.message


@pytest.mark.parametrize("prompts", [None, 5, {"role": "user", "content": "Hello"}, b"Hello"])
def test_prompts_of_another_type_are_named(prompts):
    with scripted() as llm, pytest.raises(TypeError, match=f"prompts is of type {type(prompts).__name__}; expected a"):
        llm.generate(prompts)


def test_a_completion_says_what_of_its_prompt_was_cached():
    with LLM(MODEL, num_threads=1, kv_cache_config=KvCacheConfig(enable_block_reuse=True, tokens_per_block=16)) as llm:
        prompt = [5 + n % 1000 for n in range(70)]
        first, second = (llm.generate([prompt], max_tokens=4, temperature=0, ignore_eos=True)[0] for _ in range(2))
        assert (first.prompt_tokens, first.cached_tokens) == (70, 0)
        assert second.prompt_tokens == 70 and 64 <= second.cached_tokens < 70 and second.tokens == first.tokens
        pieces = llm.stream(prompt + first.tokens + [7], max_tokens=4, temperature=0, ignore_eos=True)
        assert "".join(pieces) and 70 <= pieces.completion.cached_tokens < pieces.completion.prompt_tokens == 75
        pieces = llm.stream(prompt, max_tokens=400, ignore_eos=True)
        next(pieces)
        pieces.cancel()
        assert pieces.completion.cached_tokens is None and pieces.completion.prompt_tokens == 70
        assert llm.generate([[10**6]])[0].cached_tokens is None


def test_statistics_go_to_whom_it_is_told():
    records = []
    with scripted(return_stats=records.append) as llm:
        llm.generate([[1], [2]], max_tokens=3, ignore_eos=True)
    assert len(records) >= 3 and json.loads(records[-1])["Final Responses"] == 2
