"""AsyncLLM gives the texts of LLM. Leaving a stream in any way stops its request."""

import asyncio
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from batch_manager import ConfigError, ErrorCode, FinishReason, InvalidRequestError, ManagerClosedError, Parts
from batch_manager.testing.scripted_backend import ScriptedBackend

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from batch_manager.aio import AsyncEngine, RequestFailed  # noqa: E402
from batch_manager.extras.async_llm import AsyncLLM  # noqa: E402
from batch_manager.extras.llm import LLM  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
SAID = TOKENIZER.encode("We walked to the village and then home again. ", add_special_tokens=False).ids
LONG_TEXT = "It is a truth " * 900


def said(history):
    return SAID[len(history) % len(SAID)]


def run(test, *, process=False, script=said, **params):
    """Run test(llm) on a new event loop, with an AsyncLLM of a scripted model."""
    async def inside():
        backend = partial(ScriptedBackend, vocab_size=4096, max_seq_len=60_000, num_blocks=20_000, script=script,
                          is_asynchronous=True, step_seconds=0.001, verify=False)
        async with await AsyncLLM.start(MODEL, parts=Parts(backend=backend), process=process,
                                        **{"max_batch_size": 4, **params}) as llm:
            return await asyncio.wait_for(test(llm), 60)
    return asyncio.run(inside())


async def until_idle(llm):
    deadline = time.monotonic() + 30
    while llm.health()["active_requests"] or len(llm._engine._switchboard):
        assert time.monotonic() < deadline, "requests are still alive"
        await asyncio.sleep(0.002)


async def text_of(pieces):
    return "".join([piece async for piece in pieces])


def test_texts_are_those_of_llm(tmp_path):
    for file in MODEL.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    prompts = ["It is a truth", [5, 6, 7], [{"role": "user", "content": "Who is Emma?"}], {}, LONG_TEXT[:9000]]
    options = {"max_tokens": 12, "temperature": 0, "log_probs": True, "top_log_probs": 2, "stop": " her"}
    with LLM(tmp_path, num_threads=1, dtype="float32") as llm:
        expected, chat = llm.generate(prompts, **options), llm.chat(prompts[2], **options)
        assert llm.health()["state"] == "RUNNING"

    async def test():
        async with await AsyncLLM.start(tmp_path, num_threads=1, dtype="float32") as llm:
            found = [*await llm.generate(iter(prompts), **options), await llm.chat(prompts[2], **options)]
            for ours, theirs in zip(found, [*expected, chat], strict=True):
                assert (ours.text, ours.tokens, ours.finish_reason, ours.prompt_tokens) == (
                    theirs.text, theirs.tokens, theirs.finish_reason, theirs.prompt_tokens)
                assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
                assert (ours.error and ours.error.code) == (theirs.error and theirs.error.code)
            assert found[3].error.code is ErrorCode.INVALID_REQUEST
            for prompt, theirs in zip(prompts, expected):
                if theirs.error is None:
                    pieces = llm.stream(prompt, **options)
                    assert await text_of(pieces) == theirs.text == pieces.completion.text
                    assert pieces.completion.tokens == theirs.tokens and pieces.completion.timings.first_token_s > 0
            assert llm.health()["state"] == "RUNNING" and llm.info.max_seq_len > 1
            assert llm.tokenizer.get_vocab_size() == 4096

    asyncio.run(test())


@pytest.mark.parametrize("process", [False, True], ids=["in this process", "in a process of its own"])
def test_every_way_to_leave_a_stream_stops_its_request(process):
    async def test(llm):
        async for _ in llm.stream([5], max_tokens=50_000):
            break
        for leave in (lambda pieces: pieces.cancel(), lambda pieces: asyncio.ensure_future(pieces.aclose())):
            pieces = llm.stream([5], max_tokens=50_000)
            first = await anext(pieces)
            leave(pieces)
            assert await text_of(pieces) == ""
            assert pieces.completion.finish_reason is FinishReason.CANCELLED
            assert pieces.completion.text.startswith(first)
        for task in (asyncio.ensure_future(llm.generate([[5]] * 20, max_tokens=50_000)),
                     asyncio.ensure_future(text_of(llm.stream([5] * 2000, max_tokens=50_000)))):
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        late = llm.stream(LONG_TEXT)
        late.cancel()
        assert await text_of(late) == ""
        (cut,) = await llm.generate([[5]], max_tokens=50_000, stop="village")
        assert cut.finish_reason is FinishReason.STOP_WORDS and cut.text.endswith(" to the ")
        await until_idle(llm)

    run(test, process=process, script=said)


def test_a_refused_request_raises_at_the_call():
    async def test(llm):
        running = [llm.stream([5], max_tokens=30_000) for _ in range(4)]
        for pieces in running:
            await anext(pieces)
        for prompt in ([5], LONG_TEXT):
            for wrong, says in (({"temperature": -1}, "temperature is -1"), ({"max_tokens": 0}, "max_tokens"),
                                ({"deadline_s": -1}, "deadline_s"), ({"min_p": 2}, "min_p"),
                                ({"speculation": 2}, "speculation")):
                with pytest.raises(RequestFailed, match=says):
                    llm.stream(prompt, **wrong)
            with pytest.raises(TypeError, match="did you mean max_tokens"):
                llm.stream(prompt, max_token=3)
            for wrong in ({"stop": ""}, {"ignore_eos": "no"}):
                with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
                    llm.stream(prompt, **wrong)
        for prompt in ([10**6], []):
            with pytest.raises(RequestFailed, match="the prompt"):
                llm.stream(prompt)
        with pytest.raises(InvalidRequestError, match="a prompt is of type dict"):
            llm.stream({"role": "user"})
        with pytest.raises(RequestFailed, match="the prompt"):
            await anext(llm.stream([5] * 60_000))
        late = (await llm.generate("a", deadline_s=0.05))[0].error
        assert late.code is ErrorCode.DEADLINE and not running[0].completion.timings
        with pytest.raises(ZeroDivisionError):
            await llm.generate([5, 6][1 // number] for number in (1, 0))

    run(test)


def test_a_closed_one_is_refused_and_a_failure_raises_once_after_the_pieces():
    async def test(llm):
        pieces = llm.stream([5], max_tokens=50_000)
        await anext(pieces)
        assert await llm.close() and await llm.close()
        text = pieces.completion.text
        with pytest.raises(RequestFailed, match="SHUTDOWN"):
            async for piece in pieces:
                text += piece
        assert pieces.completion.text == text and pieces.completion.error.tokens == pieces.completion.tokens
        assert await text_of(pieces) == ""
        with pytest.raises(ManagerClosedError, match="the AsyncLLM is closed"):
            llm.stream("a")

    run(test)


def test_a_constructor_and_another_event_loop_library_are_answered_with_the_way_out():
    for made in (AsyncLLM, AsyncEngine):
        for arguments in ((), (MODEL,), (MODEL, 1, 2, 3)):
            with pytest.raises(TypeError, match=rf"call `await {made.__name__}.start\(folder\)`"):
                made(*arguments)
        with pytest.raises(TypeError, match="start"):
            made(model_path=MODEL, gpu_memory_utilization=0.5)
        for options, says in (({"gpu_memory_utilization": 0.5}, "free_gpu_memory_fraction"),
                              ({"max_batch_sise": 3}, "max_batch_size"), ({"max_tokens": 3}, "KvCacheConfig")):
            with pytest.raises(TypeError, match=says):
                asyncio.run(made.start(MODEL, **options))
        start = made.start(MODEL)
        with pytest.raises(ConfigError, match=r"no asyncio event loop runs .* under trio, call an LLM in threads"):
            start.send(None)                   # as trio does: without an event loop of asyncio
