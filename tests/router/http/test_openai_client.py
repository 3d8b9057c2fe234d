"""The official openai client against the app."""

from collections.abc import Callable

import httpx
import openai
import pytest

from cluster.simulator.scripted_generation import ScriptedGenerator
from router.http.app import create_app
from router.http.text_codec import TextCodec

Say = Callable[..., list[int]]
HELLO = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def client(open_door: Callable[..., object]) -> Callable[[], openai.AsyncOpenAI]:
    def build() -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(create_app(open_door()))  # type: ignore[arg-type]
        http = httpx.AsyncClient(transport=transport)
        return openai.AsyncOpenAI(base_url="http://outrider/v1", api_key="none", http_client=http, max_retries=0)

    return build


async def test_chat(client: Callable[[], openai.AsyncOpenAI], say: Say, generator: ScriptedGenerator) -> None:
    ids = say("the dog sat.")
    answer = await client().chat.completions.create(model="tiny", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "the dog sat."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.prompt_tokens == len(generator.opened[0].prompt)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ids)


async def test_completion(client: Callable[[], openai.AsyncOpenAI], say: Say) -> None:
    say("the dog", finish="length")
    answer = await client().completions.create(model="tiny", prompt="the cat", max_tokens=5)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the dog", "length")


async def test_chat_stream_with_usage(client: Callable[[], openai.AsyncOpenAI], say: Say) -> None:
    ids = say("the dog sat on the log.")
    stream = await client().chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "the dog sat on the log."
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids)


async def test_completion_stream(client: Callable[[], openai.AsyncOpenAI], say: Say) -> None:
    say("the dog sat.")
    stream = await client().completions.create(model="tiny", prompt="the cat", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the dog sat."
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_clients_stream_helper_rebuilds_the_answer(
    client: Callable[[], openai.AsyncOpenAI], say: Say
) -> None:
    say("the dog sat.")
    async with client().chat.completions.stream(model="tiny", messages=HELLO) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "the dog sat."
    assert answer.choices[0].finish_reason == "stop"


async def test_wrong_model(client: Callable[[], openai.AsyncOpenAI]) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client().chat.completions.create(model="gpt-5", messages=HELLO)
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


async def test_wrong_parameter(client: Callable[[], openai.AsyncOpenAI]) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        await client().chat.completions.create(model="tiny", messages=HELLO, temperature=2.5)
    assert refused.value.param == "temperature"


async def test_too_long_a_prompt(
    client: Callable[[], openai.AsyncOpenAI], generator: ScriptedGenerator, codec: TextCodec
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as refused:
        await client().completions.create(model="tiny", prompt="xyz " * 100)
    assert refused.value.code == "context_length_exceeded"
    assert str(len(codec.encode("xyz " * 100))) in str(refused.value)
    assert generator.opened == []


async def test_models(client: Callable[[], openai.AsyncOpenAI]) -> None:
    assert [model.id async for model in client().models.list()] == ["tiny"]
    assert (await client().models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client().models.retrieve("no/such")
