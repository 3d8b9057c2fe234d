"""The official client against `outrider serve` with the default model, in real processes."""

import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.system.serving import MODEL, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_counts_its_tokens(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=12)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 12
    assert "four" in done.choices[0].text


def test_streaming_gives_the_same_text_and_one_usage_chunk(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert text == whole.choices[0].message.content
    assert len(usages) == 1
    assert usages[0] == whole.usage or usages[0].completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=24, stop=[" six"]
    )
    assert done.choices[0].finish_reason == "stop"
    assert " six" not in done.choices[0].text
    assert done.choices[0].text.rstrip().endswith("five,")


def test_a_wrong_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-nonsense", messages=QUESTION)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 3.5), ("top_p", 0.0), ("max_tokens", 0), ("n", 0), ("stop", [""])]
)
def test_a_wrong_parameter_is_named(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, **{field: value})  # type: ignore[call-overload]
    assert caught.value.param == field


def test_too_long_a_prompt_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)


def test_seeded_sampling_is_the_same_with_and_without_speculation(client: openai.OpenAI) -> None:
    def text(enabled: bool) -> str:
        done = client.completions.create(
            model=MODEL,
            prompt="A shopping list: bread, milk, eggs, bread, milk, eggs, bread,",
            temperature=0.8,
            top_p=0.9,
            seed=11,
            max_tokens=32,
            extra_body={"speculation": {"enabled": enabled}},
        )
        return done.choices[0].text

    assert text(True) == text(False)


def test_the_example_in_the_readme_works(server: Server) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server.url).replace("stream=True,", "stream=True,\n    temperature=0,")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
