"""LoRA adapters by name: AsyncEngine, LLM and AsyncLLM, the OpenAI server with its routes and metrics.

The adapters are those of examples/adapters. The tokens of the server are those of an LLM, which are peft's.
"""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from batch_manager import ConfigError, InvalidRequestError, ModelLoadError, PeftCacheConfig, TrtGptModelOptionalParams
from batch_manager.adapter_values import AdapterInfo
from batch_manager.aio import AsyncEngine, RequestFailed
from batch_manager.aio.adapter_names import AdapterNames, NameInUseError
from batch_manager.extras.prometheus import PrometheusStatistics
from batch_manager.names import ErrorCode

pytest.importorskip("tokenizers")
from batch_manager.extras.async_llm import AsyncLLM  # noqa: E402
from batch_manager.extras.llm import LLM  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "models" / "austen-4m"
ADAPTERS = {name: EXAMPLES / "adapters" / name for name in ("plays", "definitions")}
PROMPT, GREEDY = "MARRIAGE", {"temperature": 0, "max_tokens": 12}
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def expected():
    """Name of an adapter, or None -> the text after PROMPT, as transformers and peft generate it."""
    transformers, peft, torch = map(pytest.importorskip, ("transformers", "peft", "torch"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    texts = {}
    for name in (None, *ADAPTERS):
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, ADAPTERS[name])
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=12)
        texts[name] = tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True)
    assert len(set(texts.values())) == 3
    return texts


def test_an_llm_generates_with_an_adapter_as_peft_does(expected):
    with LLM(MODEL, adapters=ADAPTERS, **OPTIONS) as llm:
        for name, text in expected.items():
            assert llm.generate(PROMPT, adapter=name, **GREEDY)[0].text == text
        assert "".join(llm.stream(PROMPT, adapter="plays", **GREEDY)) == expected["plays"]
        with pytest.raises(InvalidRequestError, match=r"adapter is \['plays'\]; expected one of"):
            llm.generate(PROMPT, adapter=["plays"])
        for call in (llm.generate, llm.stream):
            with pytest.raises(InvalidRequestError, match="adapter is 'verses'; expected one of plays, definitions"):
                call(PROMPT, adapter="verses")
    with pytest.raises(ConfigError, match="adapters is of type list; expected a mapping"):
        LLM(MODEL, adapters=["plays"], **OPTIONS)
    with pytest.raises(ModelLoadError, match="expected a folder with adapter_config.json"):
        LLM(MODEL, adapters={"x": MODEL / "absent"}, **OPTIONS)
    with LLM(MODEL, **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="no adapters are loaded"):
        llm.generate(PROMPT, adapter="plays")


def test_the_requests_of_an_async_llm_have_different_adapters_in_the_same_steps(expected):
    async def main():
        async with await AsyncLLM.start(MODEL, adapters=ADAPTERS, **OPTIONS) as llm:
            texts = await asyncio.gather(*(llm.generate(PROMPT, adapter=name, **GREEDY) for name in expected))
            assert [text[0].text for text in texts] == list(expected.values())
            pieces = llm.stream(PROMPT, adapter="definitions", **GREEDY)
            assert "".join([piece async for piece in pieces]) == expected["definitions"]
            with pytest.raises(InvalidRequestError, match="verses"):
                await llm.generate(PROMPT, adapter="verses")

    asyncio.run(main())


@pytest.mark.parametrize("process", [False, True])
def test_an_engine_loads_replaces_and_unloads_adapters_by_name(process, expected):
    params = TrtGptModelOptionalParams(peft_cache_config=PeftCacheConfig(max_adapter_size=4), **OPTIONS)
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tensors = {"input_ids": tokenizer.encode(PROMPT).ids, "request_output_len": 12, "runtime_top_k": 1}

    async def main():
        async with await AsyncEngine.start(MODEL, optional_params=params, process=process) as engine:
            async def text(name):
                return tokenizer.decode((await engine.generate(tensors, adapter=name)).tokens)

            info = await engine.load_adapter("a", ADAPTERS["plays"])
            assert info.adapter_size == 4 and info.task_id == 2**63 and engine.adapters() == {"a": info}
            assert [await text("a"), await text(None)] == [expected["plays"], expected[None]]
            with pytest.raises(NameInUseError, match="'a' is in use"):
                await engine.load_adapter("a", ADAPTERS["definitions"])
            stream = engine.stream({**tensors, "request_output_len": 200}, adapter="a")
            await anext(stream)
            later = await engine.load_adapter("a", ADAPTERS["definitions"], replaces=True)
            assert later.task_id > info.task_id and await text("a") == expected["definitions"]
            assert sum([len(delta.tokens) async for delta in stream]) > 12        # goes on with the old one
            assert engine.adapter_name(info.task_id) == engine.adapter_name(later.task_id) == "a"
            for number in range(8):                # the worker may take the requests after the name has moved on
                now = ("definitions", "plays")[number % 2]
                streams = [engine.stream(tensors, adapter="a") for _ in range(3)]
                await engine.load_adapter("a", ADAPTERS[("plays", "definitions")[number % 2]], replaces=True)
                for stream in streams:
                    found = [token async for delta in stream for token in delta.tokens]
                    assert tokenizer.decode(found) == expected[now]
            streams = engine.streams([(tensors, {"adapter": "a"})] * 2)
            with pytest.raises(RequestFailed):
                engine.streams([(tensors, {"adapter": "a"}), ({"input_ids": []}, {"adapter": "a"})])
            with pytest.raises(RequestFailed, match="a request has one adapter"):
                engine.check({**tensors, "lora_task_id": 3}, adapter="a")
            await engine.unload_adapter("a")
            assert engine.adapters() == {} and not any([stream.cancel() for stream in streams])
            with pytest.raises(RequestFailed) as failed:
                engine.stream(tensors, adapter="a")
            assert failed.value.code is ErrorCode.LORA_TASK_NOT_CACHED
            with pytest.raises(ConfigError, match="no adapter 'a'"):
                await engine.unload_adapter("a")
            with pytest.raises(ModelLoadError, match="expected a folder"):
                await engine.load_adapter("a", MODEL / "absent")
            assert engine.adapters() == {}

    asyncio.run(main())


def test_an_engine_without_a_cache_for_adapters_says_what_to_set():
    async def main():
        async with await AsyncEngine.start(MODEL, optional_params=TrtGptModelOptionalParams(**OPTIONS)) as engine:
            with pytest.raises(ConfigError, match="peft_cache_config"):
                await engine.load_adapter("a", ADAPTERS["plays"])

    asyncio.run(main())


def test_a_prefetched_adapter_with_a_value_that_is_not_finite_is_refused_by_folder_and_tensor(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()
    np.save(folder / "model.lora_weights.npy", np.full((1, 4096), np.nan, np.float32))
    np.save(folder / "model.lora_config.npy", np.array([[1, 0, 1]]))
    with pytest.raises(ModelLoadError, match=r"/7: row 0 of lora_weights is not finite"):
        LLM(MODEL, peft_cache_config=PeftCacheConfig(lora_prefetch_dir=tmp_path), **OPTIONS)


def test_a_name_is_free_again_after_a_load_that_failed():
    class Manager:
        def load_adapter(self, task_id, adapter):
            raise ConfigError("broken", "", "")

    names = AdapterNames(Manager())
    for _ in range(2):
        with pytest.raises(ConfigError, match="broken"):
            names.load("a", "folder", replaces=False)
    for name in ("", 3):
        with pytest.raises(ConfigError, match="expected a non-empty string"):
            names.load(name, "folder", replaces=False)


def test_loads_of_one_name_at_the_same_time_and_an_id_that_is_taken():
    begun, go, forgotten = threading.Event(), threading.Event(), []

    class Manager:
        def load_adapter(self, task_id, adapter):
            if task_id == 2**63:
                raise InvalidRequestError(f"LoRA task {task_id} is in the cache with other content", "", "")
            if adapter == "first":
                begun.set()
                assert go.wait(60)
            return AdapterInfo(task_id=task_id, adapter_size=1, num_bytes=1, modules=(), digest=adapter)

        def forget_adapter(self, task_id):
            forgotten.append(task_id)

    names = AdapterNames(Manager())
    thread = threading.Thread(target=names.load, args=("a", "first", True))
    thread.start()
    assert begun.wait(60)
    with pytest.raises(NameInUseError):
        names.load("a", "no", replaces=False)
    with pytest.raises(ConfigError, match="no adapter 'a'"):
        names.unload("a")
    assert names.load("a", "last", replaces=True).task_id == 2**63 + 2
    go.set()
    thread.join(60)
    assert names.infos["a"].digest == "last" and forgotten == [2**63 + 1] and names.name_of(2**63) is None


def test_an_adapter_is_forgotten_with_the_last_lease_of_its_requests():
    forgotten = SimpleQueue()

    class Manager:
        def load_adapter(self, task_id, adapter):
            return AdapterInfo(task_id=task_id, adapter_size=1, num_bytes=1, modules=(), digest=adapter)

        def forget_adapter(self, task_id):
            forgotten.put(task_id)
            raise ConfigError("the engine has ended", "", "")

    names = AdapterNames(Manager())
    first = names.load("a", "first", replaces=False).task_id
    leases = [names.lease("a") for _ in range(2)]
    names.load("a", "second", replaces=True)
    later = names.lease("a")
    leases[0].end()
    leases[0].end()
    assert forgotten.empty() and names.lease("b") is None
    leases[1].end()
    assert forgotten.get(timeout=60) == first
    later.end()
    with pytest.raises(ConfigError, match="ended"):      # no request has it: the caller learns how it went
        names.unload("a")
    assert forgotten.get(timeout=60) == later.task_id and not names._users and not names._retired


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """server(test, **options): run an async test(client, folder of --lora-root) against the server's application."""
    application = pytest.importorskip("batch_manager.extras.openai.application")
    adapters = pytest.importorskip("batch_manager.extras.openai.adapters")
    httpx = pytest.importorskip("httpx")

    def run(test, root=True, **options):
        folder = tmp_path_factory.mktemp("root")
        if root:
            shutil.copytree(ADAPTERS["definitions"], folder / "late")
            shutil.copytree(ADAPTERS["definitions"], folder / "broken")
            (folder / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
            shutil.copytree(ADAPTERS["definitions"], folder / "linked")
            (folder / "linked" / "adapter_model.safetensors").unlink()
            (folder / "linked" / "adapter_model.safetensors").symlink_to(
                ADAPTERS["definitions"] / "adapter_model.safetensors")
            (folder / "outside").symlink_to(ADAPTERS["plays"])
        app = application.make_app(str(MODEL), adapters=adapters.AdapterOptions(
            modules={"plays": str(ADAPTERS["plays"])}, root=str(folder) if root else None, **options), **OPTIONS)

        async def main():
            async with app.router.lifespan_context(app), httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://server") as client:
                await test(client, folder)

        asyncio.run(main())

    return run


async def post(client, path, **body):
    response = await client.post(path, json=body)
    return response.status_code, response.text


async def text_of(client, model=None):
    body = {"prompt": PROMPT, **GREEDY, **({} if model is None else {"model": model})}
    response = await client.post("/v1/completions", json=body)
    return response.json()["choices"][0]["text"] if response.status_code == 200 else response.status_code


def test_clients_name_an_adapter_as_the_model_and_load_others_below_the_root(server, expected):
    openai = pytest.importorskip("openai")

    async def test(client, root):
        assert [await text_of(client, name) for name in (None, "austen-4m", "plays", "late")] == [
            expected[None], expected[None], expected["plays"], 404]
        assert await post(client, "/v1/load_lora_adapter", lora_name="late", lora_path="late") == (
            200, "Success: LoRA adapter 'late' added successfully.")
        assert await text_of(client, "late") == expected["definitions"]
        models = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert list(models) == ["austen-4m", "plays", "late"] and "parent" not in models["austen-4m"]
        assert models["late"]["parent"] == "austen-4m"
        assert models["late"]["max_model_len"] == models["austen-4m"]["max_model_len"] == 2048
        assert (await client.get("/v1/models/late")).json() == models["late"]

        theirs = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client)
        answer = await theirs.completions.create(model="plays", prompt=PROMPT, **GREEDY)
        assert answer.choices[0].text == expected["plays"] and answer.model == "plays"
        stream = await theirs.completions.create(model="late", prompt=PROMPT, stream=True, **GREEDY)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected["definitions"]
        assert {model.id for model in (await theirs.models.list()).data} == set(models)

        plays_before = await post(client, "/v1/load_lora_adapter", lora_name="late", lora_path=str(root / "late"),
                                  load_inplace=True)
        assert plays_before[0] == 200 and await text_of(client, "late") == expected["definitions"]
        for status, path, body, words in (
                (409, "load", {"lora_name": "late", "lora_path": "late"}, "in use; unload it first"),
                (409, "load", {"lora_name": "austen-4m", "lora_path": "late"}, "name of the model"),
                (409, "load", {"lora_name": str(MODEL), "lora_path": "late"}, "name of the model"),
                (400, "load", {"lora_name": "x", "lora_path": "linked"}, "to the file of the server"),
                (400, "load", {"lora_name": "x", "lora_path": "broken"}, "adapter_config.json: use_dora is True"),
                (400, "load", {"lora_name": "x", "lora_path": "outside"}, "below the server's --lora-root"),
                (400, "load", {"lora_name": "x", "lora_path": "../.."}, "below the server's --lora-root"),
                (400, "load", {"lora_name": "x", "lora_path": str(ADAPTERS["plays"])}, "below the server's"),
                (400, "load", {"lora_name": "x", "lora_path": "absent"}, "below the server's --lora-root"),
                (400, "load", {"lora_name": "x", "lora_path": "late\0"}, "below the server's --lora-root"),
                (400, "load", {"lora_name": "x", "lora_path": "."}, "below the server's --lora-root"),
                (400, "load", {"lora_name": "x"}, "lora_path: it is missing"),
                (400, "load", {"lora_path": "late"}, "lora_name: expected a name"),
                (400, "load", {"lora_name": "a,b", "lora_path": "late"}, "without a comma"),
                (400, "load", {"lora_name": "x", "lora_path": "late", "rank": 3}, "rank: unknown name"),
                (404, "unload", {"lora_name": "x"}, "no adapter 'x'")):
            found, text = await post(client, f"/v1/{path}_lora_adapter", **body)
            assert (found, words in text, str(root) in text) == (status, True, False), text
        assert (await post(client, "/v1/unload_lora_adapter", lora_name="late"))[0] == 200
        assert await text_of(client, "late") == 404 and await text_of(client, "plays") == expected["plays"]

    server(test, most_on_device=3, largest_rank=8)


def test_without_a_root_clients_load_nothing_and_a_large_rank_is_refused(server):
    async def test(client, root):
        assert (await post(client, "/v1/load_lora_adapter", lora_name="x", lora_path="late"))[0] == 404

    server(test, root=False)

    async def never(client, root):
        raise AssertionError("the server started")

    with pytest.raises(InvalidRequestError, match="adapter size 4; it must be in 1..2"):
        server(never, largest_rank=2)


def test_metrics_name_the_adapters_of_running_and_waiting_requests(server):
    statistics = PrometheusStatistics("m", 4, {1: "plays"}.get)
    assert "lora" not in statistics.exposition().decode()
    statistics(json.dumps({"Running LoRA Tasks": "1,7", "Waiting LoRA Tasks": "", "LoRA Device Pages": 32,
                           "Used LoRA Device Pages": 8, "Scheduled Requests": 0, "Used KV cache blocks": 0,
                           "Max KV cache blocks": 1}))
    text = statistics.exposition().decode()
    assert 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="plays,7",waiting_lora_adapters=""}' in text
    assert 'sglang:lora_pool_slots_used{model_name="m"} 8.0' in text
    assert 'sglang:lora_pool_slots_total{model_name="m"} 32.0' in text

    async def test(client, root):
        await text_of(client, "plays")
        text = (await client.get("/metrics")).text
        assert 'vllm:lora_requests_info{max_lora="2",' in text and 'slots_total{model_name="austen-4m"} 8.0' in text

    server(test, most_on_device=2, largest_rank=4)


@pytest.mark.parametrize("options, words", [
    (["--lora-modules", "plays"], "expected NAME=FOLDER"), (["--lora-modules", "=x"], "expected NAME=FOLDER"),
    (["--lora-modules", "a=x", "a=y"], "each name once"), (["--lora-root", "/absent"], "expected an existing folder"),
    (["--max-loras", "0"], "--max-loras")])
def test_wrong_options_of_the_server_are_refused(options, words, capsys):
    pytest.importorskip("uvicorn")
    from batch_manager.tools.serve import main

    try:
        status = main([str(MODEL), "--port", "0", *options])
    except SystemExit as end:
        status = end.code
    assert status == 2 and words in capsys.readouterr().err
