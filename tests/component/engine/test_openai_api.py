"""The API as the official client and plain HTTP see it, on one group of two ranks."""

import asyncio
import json
import socket
import threading

import openai
import pytest


@pytest.fixture
def client(bed):
    bed.head("--shutdown-timeout", "0", "--max-model-len", "512", size=2, local=2)
    bed.wait_ready()
    return openai.OpenAI(base_url=f"http://127.0.0.1:{bed.port}/v1", api_key="none", max_retries=0)


def test_the_openai_package_completes_chats_and_streams(client):
    done = client.completions.create(model="test-model", prompt="hello", max_tokens=12)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 12
    chat = client.chat.completions.create(
        model="test-model", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=7
    )
    assert chat.choices[0].message.role == "assistant"
    assert len(chat.choices[0].message.content) == 7
    chunks = list(
        client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len(chunks) == 8, "one chunk a token, then usage"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 7
    assert [model.id for model in client.models.list()] == ["test-model"]


def test_several_prompts_and_choices_come_back_in_order(client):
    prompts = ["one", "two"]
    alone = [client.completions.create(model="test-model", prompt=text, n=2, max_tokens=9) for text in prompts]
    both = client.completions.create(model="test-model", prompt=prompts, n=2, max_tokens=9)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert texts == [choice.text for done in alone for choice in done.choices]
    assert len(set(texts)) == 4
    assert both.usage.completion_tokens == 36


def test_token_ids_are_a_prompt_and_echo_gives_it_back(client):
    text = client.completions.create(model="test-model", prompt="hi", max_tokens=4).choices[0].text
    echoed = client.completions.create(model="test-model", prompt=list(b"hi"), max_tokens=4, echo=True)
    assert echoed.choices[0].text == "hi" + text


def test_a_stop_string_ends_the_text_before_it_and_is_never_streamed(client):
    words = client.completions.create(model="test-model", prompt="hello", max_tokens=60).choices[0].text
    stop = words[20:26]
    done = client.completions.create(model="test-model", prompt="hello", max_tokens=60, stop=[stop])
    expected = words[: words.index(stop)]
    assert (done.choices[0].text, done.choices[0].finish_reason) == (expected, "stop")
    stream = client.completions.create(model="test-model", prompt="hello", max_tokens=60, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_text_without_a_limit_ends_by_itself(client):
    chat = client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": "hello"}])
    assert chat.choices[0].finish_reason in {"stop", "length"}
    assert 256 <= chat.usage.completion_tokens < 512


def test_mistakes_are_answered_in_openais_shape(client, bed):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model="test-model", prompt="x" * 600)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        client.completions.create(model="test-model", prompt="x", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="n must be between 1 and 128"):
        client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": "x"}], n=0)


MISTAKES = [
    ("POST", "/v1/completions", {"model": "test-model"}, 400, "BadRequestError"),
    ("POST", "/v1/completions", ["no", "object"], 400, "BadRequestError"),
    ("POST", "/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "BadRequestError"),
    ("POST", "/v1/chat/completions", {"messages": []}, 400, "BadRequestError"),
    ("POST", "/v1/chat/completions", {"model": "other", "messages": [{"role": "user"}]}, 404, "NotFoundError"),
    ("GET", "/v1/nothing", None, 404, "NotFoundError"),
    ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
    ("POST", "/v1/completions", "x" * (65 * 2**20), 413, "Request Entity Too Large"),
]


def test_every_error_has_openais_shape(client, bed):
    for method, path, body, code, kind in MISTAKES:
        status, text, headers = bed.request(method, path, body)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["type"]) == (code, code, kind)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert headers["Content-Type"].startswith("application/json")


def test_a_dead_rank_is_an_error_in_openais_shape_too(bed):
    bed.head("--fault", "fatal-on-request", size=1, local=1, env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    bed.wait_ready()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{bed.port}/v1", api_key="none", max_retries=0)
    for _ in range(2):  # the request that meets the death, and one that comes later
        with pytest.raises(openai.InternalServerError, match="EngineCore encountered an issue") as caught:
            client.completions.create(model="test-model", prompt="x")
        assert caught.value.type == "InternalServerError"


def test_the_openai_package_reads_log_probabilities_of_completions(client):
    asked = {"model": "test-model", "prompt": "hello", "max_tokens": 4, "logprobs": 2}
    done = client.completions.create(**asked).choices[0]
    found = done.logprobs
    assert "".join(found.tokens) == done.text
    assert found.text_offset == [0, 1, 2, 3]
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert (len(top), top[token]) == (2, value)
        assert all(other <= value <= 0 for other in top.values())
    chunks = list(client.completions.create(**asked, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == found.tokens
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == found.text_offset
    assert client.completions.create(model="test-model", prompt="hello").choices[0].logprobs is None


def test_the_openai_package_reads_log_probabilities_of_chats(client):
    asked = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
    done = client.chat.completions.create(**asked, top_logprobs=3).choices[0]
    content = done.logprobs.content
    assert "".join(item.token for item in content) == done.message.content
    assert bytes(byte for item in content for byte in item.bytes).decode() == done.message.content
    for item in content:
        best, *others = item.top_logprobs
        assert (best.token, best.logprob, len(others)) == (item.token, item.logprob, 2)
    chunks = list(client.chat.completions.create(**asked, top_logprobs=3, stream=True))
    streamed = [item for chunk in chunks for item in chunk.choices[0].logprobs.content]
    assert streamed == content
    without_top = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [item.top_logprobs for item in without_top] == [[], [], []]


def test_service_endpoints_answer_as_vllms(client, bed):
    assert json.loads(bed.request("GET", "/version")[1]) == {"version": "0.33.0"}
    assert bed.request("GET", "/ping")[0] == bed.request("POST", "/ping")[0] == 200
    assert json.loads(bed.request("GET", "/load")[1]) == {"server_load": 0}
    status, body, headers = bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-Request-Id": "abc"})
    assert (status, json.loads(body)["id"]) == (200, "cmpl-abc")
    assert "X-Request-Id" not in headers


def test_request_ids_are_answered_where_that_was_asked_for(bed):
    bed.head("--enable-request-id-headers", size=1, local=1)
    bed.wait_ready()
    assert bed.request("POST", "/v1/completions", {"prompt": "x"}, {"X-Request-Id": "abc"})[2]["X-Request-Id"] == "abc"
    assert bed.request("POST", "/v1/completions", {"prompt": "x"})[2]["X-Request-Id"]


def test_the_api_can_be_on_a_unix_socket(bed, tmp_path):
    path = str(tmp_path / "api")
    head = bed.head("--uds", path, size=1, local=1)
    head.wait_for("Application startup complete")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)
        caller.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.0 200")


def test_the_load_counts_requests_under_way_when_asked_to(bed, wait):
    bed.head("--enable-server-load-tracking", "--tokens-per-second", "20", size=1, local=1)
    bed.wait_ready()
    thread = threading.Thread(target=lambda: bed.complete(max_tokens=20, ignore_eos=True))
    thread.start()
    wait(lambda: bed.request("GET", "/load")[1] == '{"server_load": 1}', within_s=10, last=bed.logs)
    thread.join()
    assert bed.request("GET", "/load")[1] == '{"server_load": 0}'


def test_elastic_endpoints_answer_as_without_ray(client, bed):
    def scale(size):
        return bed.request("POST", "/scale_elastic_ep", {"new_data_parallel_size": size})[0]

    assert [scale(2), scale(3), scale(0), scale("many")] == [200, 500, 400, 400]
    assert json.loads(bed.request("POST", "/is_scaling_elastic_ep")[1]) == {"is_scaling_elastic_ep": False}
    assert bed.request("GET", "/is_scaling_elastic_ep")[0] == 405


async def test_concurrent_requests_spread_evenly_over_the_ranks(client, bed):
    asked = openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)
    calls = [asked.completions.create(model="test-model", prompt=str(n), max_tokens=20) for n in range(12)]
    await asyncio.gather(*calls)
    assert [bed.metric("vllm:request_success_total", rank=rank, finished_reason="length") for rank in (0, 1)] == [6, 6]


def test_an_api_key_is_demanded_when_set(bed):
    bed.head("--api-key", "secret", size=1, local=1)
    bed.wait_ready()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{bed.port}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="Unauthorized"):
        client.completions.create(model="test-model", prompt="x")
    assert bed.complete(headers={"Authorization": "Bearer secret"})
