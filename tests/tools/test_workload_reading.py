"""Files of requests in each format give the right arrivals and workload, and each fault in a file gives its error."""

import gzip
import json
import os
import re
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batch_manager.tools.datasets import DatasetError, ReadReport, Selection, read_arrivals, read_workload
from batch_manager.tools.traffic import Arrival
from batch_manager.tools.workload import Lengths, make_workload

WORKLOAD = make_workload(count=3, vocab_size=90, rate=2.0, prompts=Lengths(6, 0.4, 2, 9), outputs=Lengths(4, 0.4, 2, 6))
FILES = {
    "workload": json.dumps(WORKLOAD),
    "array": '[{"input_ids": [5, 6, 7], "output_len": 4}, {"input_ids": [8], "output_len": 2}]',
    "dataset": '{"metadata": {"workload_name": "n:1__m:2"}, // made by hand\n "samples": [\n'
               '{"input_ids": [5, 6], "output_len": 4, "delay": 0.5, "task_id": -1}, /* two\n lines */\n'
               '{"input_ids": [5], "output_len": 2, "delay": 0.25}, {"input_ids": [9], "output_len": 1, "delay": 0}]}',
    "lines": '{"task_id": 0, "input_ids": [5, 6], "output_tokens": 4}\n{"input_ids": [8], "output_len": 2}\n',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
             "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:16:00.0000001,1,1",
    "azure 2024": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,7,5\n"
                  "2024-05-10 00:00:00.009930+00:00,2162,5\n",
    "mooncake": '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
                '{"timestamp": 27, "input_length": 1100, "output_length": 6, "hash_ids": [0, 3, 4]}\n'
                '{"timestamp": 3000, "input_length": 700, "output_length": 7, "hash_ids": [0, 1, 8]}\n',
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API\n118.5,GPT-4,417,276,693,API\n",
    "csv": "input_tokens,output_tokens,arrival_s\n5,6,0.5\n7,8,0.75\n",
}
ARRIVALS = {
    "workload": [Arrival(one["arrival_s"], len(one["prompt"]), one["max_tokens"], (i,))
                 for i, one in enumerate(WORKLOAD["requests"])],
    "array": [Arrival(0.0, 3, 4, (0,)), Arrival(0.0, 1, 2, (1,))],
    "dataset": [Arrival(0.0, 2, 4, (0,)), Arrival(0.5, 1, 2, (1,)), Arrival(0.75, 1, 1, (2,))],
    "lines": [Arrival(0.0, 2, 4, (0,)), Arrival(0.0, 1, 2, (1,))],
    "azure": [Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109), Arrival(13.3194101, 1, 1)],
    "azure 2024": [Arrival(0.0, 7, 5), Arrival(0.00993, 2162, 5)],
    "mooncake": [Arrival(0.0, 700, 5, (0, 1)), Arrival(0.027, 1100, 6, (0, 3, 4)), Arrival(3.0, 700, 7, (0, 1))],
    "burstgpt": [Arrival(0.0, 472, 18), Arrival(113.5, 417, 276)],
    "csv": [Arrival(0.0, 5, 6), Arrival(0.25, 7, 8)],
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="file"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path, **options):
    with pytest.raises(DatasetError) as raised:
        list(read_arrivals(path, **options))
    text = str(raised.value)
    assert "\n" not in text and text.count("; ") >= 1
    return text.removeprefix(str(path))


@pytest.mark.parametrize("name", FILES)
def test_the_format_is_known_by_its_content(name, write):
    report = ReadReport()
    assert list(read_arrivals(write(FILES[name]), report=report)) == ARRIVALS[name]
    assert report.format == {"array": "dataset", "lines": "dataset", "azure 2024": "azure"}.get(name, name)
    assert report.kept == len(ARRIVALS[name])
    assert list(read_arrivals(write(FILES[name]), format=report.format)) == ARRIVALS[name]


@pytest.mark.parametrize("name", FILES)
def test_a_workload_has_the_arrivals_of_the_same_file(name, write):
    made = read_workload(write(FILES[name]), vocab_size=100)
    lengths = [(one["arrival_s"], len(one["prompt"]), one["max_tokens"]) for one in made["requests"]]
    assert lengths == [(one.arrival_s, one.input_tokens, one.output_tokens) for one in ARRIVALS[name]]
    assert made["n"] == len(lengths) and made["prompt_tokens"] == sum(length for _, length, _ in lengths)
    assert made["mode"] == ("offline" if name in ("array", "lines") else "online")
    assert all(0 <= token < 100 for one in made["requests"] for token in one["prompt"])
    assert list(made)[:10] == list(WORKLOAD)[:10] and list(made)[-1] == "requests"


def test_a_workload_file_is_returned_as_it_stands(write):
    whole = {**WORKLOAD, "note": "mine", "requests": [{**one, "priority": 3} for one in WORKLOAD["requests"]]}
    assert read_workload(write(json.dumps(whole)), vocab_size=90) == whole
    part = read_workload(write(json.dumps(whole)), Selection(first=1, max_output_tokens=3), vocab_size=90)
    assert [one["id"] for one in part["requests"]] == [1, 2] and part["requests"][0]["priority"] == 3
    assert part["source"]["first"] == 1 and part["n"] == 2 and part["requests"][0]["arrival_s"] == 0
    assert max(one["max_tokens"] for one in part["requests"]) <= 3


def test_prompts_share_what_their_block_ids_share(write):
    path = write(FILES["mooncake"])
    first, second, third = [one["prompt"] for one in read_workload(path, vocab_size=5000)["requests"]]
    assert first[:512] == second[:512] and first[512:] != second[512:700] and first == third
    assert len(set(first)) > 400
    other = read_workload(path, Selection(seed=1), vocab_size=5000)["requests"][0]["prompt"]
    assert other != first and len(other) == len(first)
    clipped = read_workload(path, Selection(max_input_tokens=600), vocab_size=5000)["requests"]
    assert clipped[0]["prompt"] == first[:600] and clipped[1]["prompt"] == second[:600]


def test_a_prompt_of_a_slice_is_the_one_it_has_in_the_whole_file(write):
    path = write(FILES["azure"])
    whole, part = (read_workload(path, Selection(first=n), vocab_size=500)["requests"] for n in (0, 1))
    assert [one["prompt"] for one in whole[1:]] == [one["prompt"] for one in part]
    assert [one["arrival_s"] for one in part] == pytest.approx([0.0, 13.3194101 - 4.314579])


def test_beginnings_that_prompts_share_are_seen_in_the_arrivals(write):
    made = make_workload(count=3, vocab_size=900, prompts=Lengths(1, 1, 1, 1, fixed=1300), shared_prefix=1024)
    ids = [one.prefix_ids for one in read_arrivals(write(json.dumps(made)))]
    assert ids == [(0, 1, 2), (0, 1, 3), (0, 1, 4)]


@pytest.mark.parametrize("selection, expected", [
    (Selection(time_scale=0.5), [(0.0, 700, 5), (0.0135, 1100, 6), (1.5, 700, 7)]),
    (Selection(first=1, count=1), [(0.0, 1100, 6)]),
    (Selection(max_input_tokens=800, max_output_tokens=6), [(0.0, 700, 5), (0.027, 800, 6), (3.0, 700, 6)]),
    (Selection(max_input_tokens=800, longer="drop"), [(0.0, 700, 5), (3.0, 700, 7)]),
    (Selection(max_input_tokens=800, longer="drop", first=1, count=1), [(0.0, 700, 7)]),
    (Selection(request_rate=4.0, delays="constant"), [(0.0, 700, 5), (0.25, 1100, 6), (0.5, 700, 7)]),
    (Selection(request_rate=0), [(0.0, 700, 5), (0.0, 1100, 6), (0.0, 700, 7)]),
])
def test_what_a_selection_takes(selection, expected, write):
    arrivals = read_arrivals(write(FILES["mooncake"]), selection)
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in arrivals] == expected


@pytest.mark.parametrize("selection, told", [
    (Selection(request_rate=1e-300), "the request arrives at "), (Selection(request_rate=1e-320), "arrives at inf s; "),
    (Selection(time_scale=1e12), "expected at most 1e+10 s; lower --time-scale, or raise the rate"),
    (Selection(time_scale=1e308), "the request arrives at inf s; expected")])
def test_a_selection_that_lasts_too_long_is_refused(selection, told, write):
    path = write("arrival_s,input_tokens,output_tokens\n0,5,1\n90,5,1\n")
    with pytest.raises(DatasetError, match=f":3: .*{re.escape(told)}"):
        list(read_arrivals(path, selection))


def test_exponential_delays_have_their_rate_and_come_from_the_seed(write):
    path = write("arrival_s,input_tokens,output_tokens\n" + "0,5,5\n" * 2000)
    times = {seed: [one.arrival_s for one in read_arrivals(path, Selection(request_rate=10.0, seed=seed))]
             for seed in (0, 1)}
    assert times[0] != times[1] and times[0][0] == 0 and times[0] == sorted(times[0])
    assert all(170 < one[-1] < 230 for one in times.values())


def test_what_was_changed_is_counted(write):
    report = ReadReport()
    list(read_arrivals(write(FILES["burstgpt"]), Selection(max_input_tokens=420, max_output_tokens=100), report=report))
    assert (report.empty, report.clipped_inputs, report.clipped_outputs) == (1, 1, 1)
    assert report.notes() == ["1 request left out: prompt or output without tokens",
                              "1 request with a prompt truncated to the limit",
                              "1 request with an output truncated to the limit",
                              "fields that are not read and have no effect: Model, Total tokens, Log Type"]
    made = read_workload(write(FILES["mooncake"]), Selection(max_input_tokens=800, longer="drop"), vocab_size=50)
    assert made["source"]["dropped"] == 1 and made["source"]["file"] == "file"


def test_block_ids_are_cut_with_the_prompt(write):
    arrivals = read_arrivals(write(FILES["mooncake"]), Selection(max_input_tokens=512))
    assert [one.prefix_ids for one in arrivals] == [(0,), (0,), (0,)]


def test_times_that_go_backwards_are_refused_or_sorted(write):
    path = write("arrival_s,input_tokens,output_tokens\n3,1,1\n1,2,2\n2,3,3\n")
    assert refusal(path).startswith(":3: the time is 2.000000 s before that of the previous request; expected")
    arrivals = list(read_arrivals(path, Selection(sort=True)))
    assert [(one.arrival_s, one.input_tokens) for one in arrivals] == [(0.0, 2), (1.0, 3), (2.0, 1)]
    path = write(FILES["azure"].replace("18:15:50", "18:15:40"))
    assert refusal(path).startswith(":3: the time is 5.685421 s before")


def test_a_trace_is_read_line_by_line(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with_rest = threading.Event()

    def feed():
        with path.open("w") as pipe:
            pipe.write("arrival_s,input_tokens,output_tokens\n" + "1,2,3\n" * 5000)
            pipe.flush()
            with_rest.wait(20)
            pipe.write("0,0,0\n")

    feeder = threading.Thread(target=feed)
    feeder.start()
    arrivals = read_arrivals(path)
    try:
        assert next(arrivals) == Arrival(0.0, 2, 3)    # the rest of the file is not written yet
    finally:
        with_rest.set()
    with pytest.raises(DatasetError, match=":5002: the time is 1.000000 s before"):
        list(arrivals)
    feeder.join(60)


@pytest.mark.parametrize("name", ["mooncake", "dataset", "azure"])
def test_files_that_are_compressed_with_gzip(name, write):
    data = gzip.compress(FILES[name].encode())
    assert list(read_arrivals(write(data))) == ARRIVALS[name]
    assert "the file cannot be read: " in refusal(write(data[:len(data) // 2]))


@pytest.mark.parametrize("content, text", [
    ("", ": the file is empty; expected at least one request; write or download the file again"),
    ("\n \n", ": the file is empty; "),
    ("hello\n", ":1: the first line is 'hello'; expected the first line of one of the formats workload, dataset"),
    ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", ":1: the header has 'TIMESTAMP, ContextTokens'; "),
    ("arrival_s,input_tokens,output_tokens\n1,5\n", ":2: the line has 2 columns; expected 3, "),
    ("arrival_s,input_tokens,output_tokens\n1,-5,3\n", ":2: input_tokens is '-5'; expected an integer"),
    ("arrival_s,input_tokens,output_tokens\n-1,5,3\n", ":2: arrival_s is -1.0; expected a number, 0 to 10000000000"),
    ("arrival_s,input_tokens,output_tokens\nnan,5,3\n", ":2: arrival_s is nan; expected a number"),
    ("arrival_s,input_tokens,output_tokens\nx,5,3\n", ":2: arrival_s is 'x'; expected a number of seconds"),
    ("arrival_s,input_tokens,output_tokens\n1,5.5,3\n", ":2: input_tokens is '5.5'; expected an integer"),
    ("arrival_s,input_tokens,output_tokens\n1,99999999999,3\n", ":2: input_tokens is '99999999999'; expected"),
    ("arrival_s,input_tokens,output_tokens\n", ": no request is left: the file has 0 requests; expected at least one"),
    ("arrival_s,input_tokens,output_tokens\n1,5,0\n", ": no request is left: the file has 1 request, 1 request left"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:15:46,5,5\n", ":2: TIMESTAMP is '2023-13-16 18:15:46'; "),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", ":2: TIMESTAMP is 'yesterday'; expected a time as in"),
    (b"arrival_s,input_tokens,output_tokens\n\xff,5,3\n", ":2: the line is not UTF-8; "),
    ('{"timestamp": 0, "input_length": 5}\n', ":1: the line has no output_length; expected timestamp, input_length"),
    (FILES["mooncake"][:-30], ":3:"),
    (FILES["mooncake"].replace("27,", "-27,"), ":2: timestamp is -27; expected a number, 0 to 10000000000"),
    (FILES["mooncake"].replace("27,", "NaN,"), ":2:15: the line is not JSON: "),
    (FILES["mooncake"].replace("27,", '"27",'), ":2: timestamp is '27'; expected a number"),
    (FILES["mooncake"].replace("27,", "27, 5"), ":2:19: the line is not JSON: "),
    (FILES["mooncake"].replace("1100", "1100.5"), ":2: input_length is 1100.5; expected an integer"),
    (FILES["mooncake"].replace("[0, 3, 4]", '["a"]'), ":2: hash_ids contains 'a'; expected a list of integers"),
    (FILES["mooncake"].replace("[0, 3, 4]", "7"), ":2: hash_ids is 7; expected a list"),
    (FILES["mooncake"] + "7\n", ":4: the line is 7; expected one object per line"),
    ("[]", ":1: the array is empty; expected at least one request"),
    ('{"a": 1}', ":1: the object has the members 'a'; expected an array with the name data or requests or samples"),
    ('[{"a": 1}]', ":1: the first item has the members 'a'; expected an item in one of the formats workload"),
    (FILES["dataset"][:-2], ":5:100: the file is truncated; expected ','; write or download the file again"),
    (FILES["dataset"][:-20], ":5:"),
    (FILES["dataset"].replace("[9]", "[]"), ":5: samples[2].input_ids is empty; expected a list of at least one token"),
    (FILES["dataset"].replace("[9]", "[9.5]"), ":5: samples[2].input_ids contains a float; expected integers only"),
    (FILES["dataset"].replace("[9]", "[-9]"), ":5: samples[2].input_ids contains the token -9; expected 0 to"),
    (FILES["dataset"].replace(', "delay": 0}', "}"), ":5: samples[2] has no delay; expected a delay in all samples"),
    (FILES["dataset"].replace('"delay": 0}', '"delay": NaN}'), ":5:"),
    (FILES["dataset"].replace('"output_len": 1,', '"output_len": true,'), ":5: samples[2].output_len is True; "),
    (FILES["lines"].replace("[8]", "8"), ":2: samples[1].input_ids is 8; expected a list of at least one token id"),
    (FILES["lines"].replace("output_len", "len"), ":2: samples[1] has no output_len; expected an object with"),
    (FILES["lines"][:-5], ":2:"),
    (FILES["dataset"] + "x", ":5:102: the text is 'x'; expected the end of the file"),
    (FILES["workload"].replace('"id": 2', '"id": 1'), ":1: requests[2].id is 1; expected unique ids"),
    (FILES["workload"].replace('"id": 2', '"id": []'), ":1: requests[2].id is of type list; expected an integer"),
    (FILES["workload"].replace('"id": 2', '"id": {}'), ":1: requests[2].id is of type dict; expected an integer"),
    (FILES["workload"].replace('"id": 2', '"id": 1.0'), ":1: requests[2].id is 1.0; expected an integer, 0 to 2^64-1"),
    (FILES["workload"].replace('"id": 2', '"identity": 2'), ":1: requests[2] has no id; expected an object with id"),
    ('[{"prompt": "a"}]', ":1: the records are texts; expected a tokenizer for them; pass a model's folder"),
    ("[" * 100_000, ":1:"),
])
def test_a_file_that_is_wrong_is_refused_in_one_line_with_its_place(content, text, write):
    assert refusal(write(content)).startswith(text)


def test_tokens_beyond_the_vocabulary_are_refused(write):
    with pytest.raises(DatasetError, match=r":1: samples\[0\].input_ids contains the token 7; the vocabulary has 7"):
        read_workload(write(FILES["array"]), vocab_size=7)


def test_prompts_that_would_fill_the_memory_are_refused_before_they_are_made(write, monkeypatch):
    path = write("arrival_s,input_tokens,output_tokens\n0,1000,1\n0,2000000000,1\n")
    with pytest.raises(DatasetError, match=r":3: the prompts up to here have 2000001000 tokens, about 75 GiB; "
                       "expected at most half of the 64 GiB of memory of this machine; take fewer requests"):
        monkeypatch.setattr("batch_manager.tools.datasets.reading.memory_bytes", lambda: 64 << 30)
        read_workload(path, vocab_size=100)
    assert len(list(read_arrivals(path))) == 2
    assert read_workload(path, Selection(count=1), vocab_size=100)["n"] == 1


def test_files_that_cannot_be_opened_and_formats_that_do_not_exist(tmp_path, write):
    assert refusal(tmp_path / "none").startswith(": the file cannot be opened: No such file or directory; ")
    assert refusal(tmp_path).startswith(": the file cannot be opened: Is a directory; ")
    assert "the format is 'xml'; expected one of workload, dataset" in refusal(write("x"), format="xml")
    assert refusal(write(FILES["mooncake"]), format="azure").startswith(":1: the header has ")


@pytest.mark.parametrize("wrong", [
    {"time_scale": 0}, {"time_scale": float("nan")}, {"time_scale": "2"}, {"first": -1}, {"first": None}, {"count": 0},
    {"max_input_tokens": 0}, {"max_output_tokens": 1.5}, {"longer": "cut"}, {"delays": "uniform"}, {"seed": -1},
    {"request_rate": -1.0}, {"request_rate": float("inf")}, {"request_rate": 1.0, "time_scale": 2.0}])
def test_selections_without_sense_are_refused(wrong):
    with pytest.raises(DatasetError, match="expected|replaces"):
        Selection(**wrong)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    content = bytearray(FILES[data.draw(st.sampled_from(sorted(FILES)))].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        end = min(len(content), at + data.draw(st.integers(0, 20)))
        content[at:end] = data.draw(st.one_of(
            st.binary(max_size=8),
            st.sampled_from([b"", b"9" * 5000, b"NaN", b"-", b"\n", b"{", b"[", b'"', b"1e999"])))
    path = tmp_path_factory.mktemp("damaged") / "file"
    path.write_bytes(content)
    for read in (lambda: list(read_arrivals(path)),
                 lambda: read_workload(path, Selection(max_input_tokens=2000), vocab_size=100)):
        try:
            assert read()
        except DatasetError as error:
            assert "\n" not in str(error) and str(path) in str(error)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=8))
@example([(0.1, 1, 1), (0.1, 2, 2)])
def test_rows_in_any_order_are_sorted_when_that_is_asked_for(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{a!r},{b},{c}\n" for a, b, c in rows))
    expected = sorted(rows, key=lambda row: row[0])
    arrivals = list(read_arrivals(path, Selection(sort=True)))
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in arrivals] == [
        (at - expected[0][0], inputs, outputs) for at, inputs, outputs in expected]


MODEL = "examples/models/austen-4m"


def test_texts_with_a_tokenizer(write):
    pytest.importorskip("tokenizers")
    from batch_manager.extras.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    records = [{"prompt": "It is a truth", "output": "universally acknowledged"},
               {"text": "Emma smiled", "max_tokens": 9},
               {"instruction": "Say it again.", "input": "Emma", "output_len": 3},
               {"instruction": "Say it.", "input": "", "completion": "No."}]
    prompts = ("It is a truth", "Emma smiled", "Say it again.\nEmma", "Say it.")
    expected = [tokenizer.encode(text).ids for text in prompts]
    lengths = [len(tokenizer.encode("universally acknowledged", add_special_tokens=False).ids), 9, 3,
               len(tokenizer.encode("No.", add_special_tokens=False).ids)]
    for content in ("".join(json.dumps(one) + "\n" for one in records), json.dumps(records),
                    json.dumps({"data": records}, indent=1)):
        made = read_workload(write(content), vocab_size=5000, tokenizer=MODEL)["requests"]
        assert [one["prompt"] for one in made] == expected and [one["max_tokens"] for one in made] == lengths
        arrivals = list(read_arrivals(write(content), Selection(count=2), tokenizer=tokenizer))
        assert [one.input_tokens for one in arrivals] == [len(prompt) for prompt in expected[:2]]
    timed = write("".join(json.dumps({**one, "arrival_s": i / 4}) + "\n" for i, one in enumerate(records)))
    assert [one.arrival_s for one in read_arrivals(timed, tokenizer=MODEL)] == [0.0, 0.25, 0.5, 0.75]


class ChatTokenizer:
    """A tokenizer with the methods of transformers' tokenizers that the reader calls. Each character is one token."""

    def encode(self, text, add_special_tokens=True):
        return [ord(character) for character in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{one['role'][0]}>{one['content']}" for one in messages) + "<a>" * add_generation_prompt


def test_texts_whose_tokenizer_is_not_the_models(write):
    with pytest.raises(DatasetError, match=":1: the prompt contains the token 252; the vocabulary has 100 tokens"):
        read_workload(write('{"prompt": "ü", "max_tokens": 1}\n'), vocab_size=100, tokenizer=ChatTokenizer())


def test_the_lines_of_many_records_are_found_in_one_pass(write):
    samples = ",\n".join(['{"input_ids": [1], "output_len": 1}'] * 3000)
    assert refusal(write(f"[\n{samples},\n7]")).startswith(":3002: samples[3000] is 7; ")


def share_gpt(*turns):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def test_share_gpt_conversations(write):
    """Each answered question is a turn, as plain text. With one turn each, a request is that of other benchmarks."""
    rows = [share_gpt(("human", "ab"), ("gpt", "xyz"), ("human", "later"), ("gpt", "no")),
            share_gpt(("gpt", "zzz"), ("system", "S"), ("human", "abc"), ("gpt", "xy")),
            share_gpt(("human", "only a question")), share_gpt()]
    for content in (json.dumps(rows), "".join(f"{json.dumps(row)}\n" for row in rows)):
        report = ReadReport()
        made = read_workload(write(content), vocab_size=200, tokenizer=ChatTokenizer(), report=report)["requests"]
        encoded = ChatTokenizer().encode
        assert [(one["session"], one["prompt"], one["max_tokens"]) for one in made] == [
            (0, encoded("ab"), 3), (0, encoded("later"), 2), (1, encoded("S\nabc"), 2)]
        assert (report.format, report.kept, report.empty, report.sessions, report.unread) == ("texts", 3, 2, 2, {})
        firsts = read_workload(write(content), Selection(turns=1), vocab_size=200, tokenizer=ChatTokenizer(),
                               report=report)
        assert firsts["requests"] == [{"id": 0, "arrival_s": 0.0, "max_tokens": 3, "prompt": encoded("ab")},
                                      {"id": 1, "arrival_s": 0.0, "max_tokens": 2, "prompt": encoded("S\nabc")}]
        assert "sessions" not in firsts and any("1 request left out: turns" in note for note in report.notes())
    wrong = json.dumps([share_gpt(("robot", "a"))])
    assert "conversations[0].from is 'robot'; expected one of human, user, gpt" in refusal(
        write(wrong), tokenizer=ChatTokenizer())


def sessions(*turns):
    """Return the text of a workload with the requests (session, arrival_s, tokens, output tokens, think_s)."""
    requests = []
    for number, (session, arrival_s, tokens, output, think_s) in enumerate(turns):
        own = {name: value for name, value in (("session", session), ("think_s", think_s)) if value is not None}
        requests.append({"id": 10 + number, "arrival_s": arrival_s, "max_tokens": output, "prompt": [number] * tokens,
                         **own})
    return json.dumps({"vocab": 100, "mode": "online", "n": len(requests), "requests": requests})


TURNS = ((1, 0.0, 4, 3, None), (2, 5.0, 2, 2, None), (1, 0.0, 5, 1, 2.5), (None, 6.0, 8, 1, None), (1, 0.0, 1, 1, None))


@pytest.mark.parametrize("selection, ids, lengths", [
    (Selection(), [10, 12, 14, 11, 13], [4, 5, 1, 2, 8]),
    (Selection(turns=2), [10, 12, 11, 13], [4, 5, 2, 8]),
    (Selection(turns=1), [10, 11, 13], [4, 2, 8]),
    (Selection(first=1), [11, 13], [2, 8]),                             # the later turns have lost the first one
    (Selection(max_input_tokens=9), [10, 12, 11, 13], [4, 2, 2, 8]),    # 4 + 3 tokens are history
    (Selection(max_input_tokens=11, longer="drop"), [10, 11, 13], [4, 2, 8]),
    (Selection(request_rate=2.0, delays="constant"), [10, 12, 14, 11, 13], [4, 5, 1, 2, 8])])
def test_turns_of_sessions(selection, ids, lengths, write):
    made = read_workload(write(sessions(*TURNS)), selection, vocab_size=100)["requests"]
    assert [one["id"] for one in made] == ids and [len(one["prompt"]) for one in made] == lengths
    times = {10: 0.0, 12: 0.0, 14: 0.0, 11: 5.0, 13: 6.0}
    if selection.request_rate:
        times.update({11: 0.5, 13: 1.0})
    first = times[ids[0]]
    assert [one["arrival_s"] for one in made] == [times[one["id"]] - first for one in made]
    has_sessions = selection.turns != 1
    assert [one.get("session") for one in made] == [{10: 1, 12: 1, 14: 1, 11: 2}.get(number) if has_sessions else None
                                                    for number in ids]
    assert [one.get("think_s", 0.0) for one in made] == [2.5 if number == 12 else 0.0 for number in ids]


@pytest.mark.parametrize("turns, text", [
    ([(-1, 0.0, 4, 3, None)], "requests[0].session is -1; expected an integer, 0 to 2^63-1"),
    ([(None, 0.0, 4, 3, 1.0)], "requests[0].think_s is 1.0; expected it only in a request with the session of"),
    ([(1, 0.0, 4, 3, 1.0)], "requests[0].think_s is 1.0; expected it only"),
    ([(1, 0.0, 4, 3, None), (1, 2.0, 4, 3, None)], "requests[1].arrival_s is 2, that of the first turn of session 1"),
    ([(1, 0.0, 4, 3, None), (1, 0.0, 4, 3, -2.0)], "requests[1].think_s is -2.0; expected a number")])
def test_turns_that_are_wrong(turns, text, write):
    assert text in refusal(write(sessions(*turns)))


def test_a_reader_that_does_not_wait_for_answers_refuses_sessions(write):
    path = write(sessions(*TURNS))
    with pytest.raises(DatasetError, match="turn of a session.*--turns 1"):
        list(read_arrivals(path))
    assert [one.input_tokens for one in read_arrivals(path, Selection(turns=1))] == [4, 2, 8]
    report = ReadReport()
    read_workload(write(sessions(TURNS[3])), Selection(turns=3), vocab_size=100, report=report)
    assert any("--turns has no effect" in note for note in report.notes())


def test_batch_files_of_openai(write):
    def line(number, url, **body):
        return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url,
                           "body": {"model": "m", "temperature": 0.2, **body}}) + "\n"
    path = write(line(1, "/v1/completions", prompt="abc", max_tokens=4) + line(2, "/v1/completions", prompt=[7, 8],
                 max_tokens=5) + line(3, "/v1/chat/completions", max_completion_tokens=6, messages=[
                     {"role": "user", "content": "hi"}]))
    report = ReadReport()
    first, second, third = read_workload(path, vocab_size=200, tokenizer=ChatTokenizer(), report=report)["requests"]
    assert (first["prompt"], first["max_tokens"]) == (ChatTokenizer().encode("abc"), 4)
    assert (second["prompt"], second["max_tokens"], third["max_tokens"]) == ([7, 8], 5, 6)
    asked = ChatTokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False,
                                                add_generation_prompt=True)
    assert third["prompt"] == ChatTokenizer().encode(asked, add_special_tokens=False)
    assert report.unread == {"body.model": 3, "body.temperature": 3}
    assert report.notes() == ["fields that are not read and have no effect: body.model, body.temperature"]
    for wrong, told in ((line(1, "/v1/embeddings", input="a"), "record 0.url is '/v1/embeddings'; expected /v1/chat"),
                        (line(1, "/v1/completions", prompt="a").replace("POST", "GET"), "record 0.method is 'GET'"),
                        (line(1, "/v1/completions", prompt="a"), "record 0.body has no output length")):
        assert told in refusal(write(wrong), tokenizer=ChatTokenizer())


@pytest.mark.parametrize("content, unread", [
    ('{"requests": [{"id": 1, "arrival_s": 0, "max_tokens": 2, "prompt": [5], "stop": "a"}], "request_rate": 3}',
     {"stop": 1, "request_rate": 1}),
    ('[{"input_ids": [5], "output_len": 2, "top_k": 3, "task_id": 1}]', {"top_k": 1}),
    ('{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [], "type": "chat"}\n', {"type": 1}),
    ("arrival_s,input_tokens,output_tokens,Model\n0,3,2,a\n", {"Model": 1}),
])
def test_fields_without_an_effect_are_named(content, unread, write):
    report = ReadReport()
    read_workload(write(content), vocab_size=200, report=report)
    assert report.unread == unread and "no effect: " in report.notes()[0]


TALK = [{"from": "human", "value": "a?", "role": "user"}, {"from": "gpt", "value": "b"}]
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("record, lengths, unread", [
    ({"prompt": "abc", "conversations": TALK, "output_tokens": 7}, (3, 7), {"conversations"}),
    ({"conversations": TALK, "output": "abc"}, (2, 1), {"conversations.role", "output"}),
    ({"prompt": "abc", "max_completion_tokens": 5, "max_tokens": 2}, (3, 2), {"max_completion_tokens"}),
    ({"text": "ab", "prompt": "abc", "messages": ASKED, "max_tokens": 2}, (3, 2), {"text", "messages"}),
    ({"prompt": "abc", "output_tokens": 3, "completion": "a", "response": "bb", "output": None}, (3, 3),
     {"completion", "response"}),
    ({"prompt": "abc", "completion": "a", "response": "bb", "output": None}, (3, 1), {"response"}),
    ({"messages": ASKED, "output": "abc"}, (8, 5), {"output"}),
    ({"prompt": "abc", "input": "x", "max_tokens": 2}, (3, 2), {"input"}),
])
def test_of_competing_fields_one_is_read_and_the_others_are_named(record, lengths, unread, write):
    report = ReadReport()
    one, = read_workload(write(json.dumps(record) + "\n"), vocab_size=200, tokenizer=ChatTokenizer(),
                         report=report)["requests"]
    assert ((len(one["prompt"]), one["max_tokens"]), report.unread) == (lengths, dict.fromkeys(unread, 1))


def test_conversations_with_the_tokenizers_template(write):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk[:1], "max_tokens": 3}) + "\n")
    first, second = read_workload(path, vocab_size=200, tokenizer=ChatTokenizer())["requests"]
    assert bytes(first["prompt"]) == bytes(second["prompt"]) == b"<u>Hi<a>"
    assert (first["max_tokens"], second["max_tokens"]) == (5, 3)


@pytest.mark.parametrize("record, text", [
    ({"prompt": "a"}, ":1: record 0 has no output length; expected one of max_tokens, max_completion_tokens"),
    ({"prompt": 5, "max_tokens": 1}, ":1: record 0.prompt is 5; expected a string"),
    ({"prompt": "", "max_tokens": 1}, ":1: record 0 has a prompt without tokens; expected at least one"),
    ({"messages": [], "max_tokens": 1}, ":1: record 0.messages is of type list; expected a list of objects"),
    ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, None),
    ({"prompt": "a", "max_tokens": 0}, ":1: record 0.max_tokens is 0; expected an integer"),
])
def test_texts_that_are_wrong(record, text, write):
    class Plain:
        encode = ChatTokenizer.encode

    told = refusal(write(json.dumps(record) + "\n"), tokenizer=Plain())
    assert told.startswith(text or ":1: record 0: the tokenizer has no chat template; conversations need one")
    if text and "does not say" in text:
        (one,) = read_arrivals(write(json.dumps(record) + "\n"), tokenizer=Plain(), output_tokens=7)
        assert one.output_tokens == 7


def test_a_tokenizer_that_is_not_there(write, tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(DatasetError, match="^--tokenizer: there is no folder '.*none'; "):
        list(read_arrivals(write('{"prompt": "a", "max_tokens": 1}\n'), tokenizer=tmp_path / "none"))
