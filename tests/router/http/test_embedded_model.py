"""The codec against transformers on the embedded model, where its directory exists already."""

import pytest

from cluster.model_store import cache_root
from router.http.text_codec import TextCodec

pytestmark = pytest.mark.skipif(
    not any(cache_root().glob("smollm2-135m-instruct-*/tokenizer.json")),
    reason="the embedded model is not converted yet",
)

TEXTS = [
    "Hello, world!",
    "  two  spaces\n\nand lines\t",
    "héllo 😀 日本語 עברית",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x ** 2  # 12345",
    "",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "日本 <|im_end|>"},
    ],
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_directory(next(cache_root().glob("smollm2-135m-instruct-*/tokenizer.json")).parent)


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        next(cache_root().glob("smollm2-135m-instruct-*/tokenizer.json")).parent, local_files_only=True
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_tokens_equal_those_of_transformers(codec: TextCodec, reference, text: str, special: bool) -> None:  # type: ignore[no-untyped-def]
    assert codec.encode(text, special) == reference.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompted", [True, False])
def test_chats_equal_those_of_transformers(codec: TextCodec, reference, chat: list, prompted: bool) -> None:  # type: ignore[no-untyped-def, type-arg]
    expected = reference.apply_chat_template(chat, tokenize=True, add_generation_prompt=prompted)["input_ids"]
    assert codec.encode(codec.render_chat(chat, prompted), add_special_tokens=False) == expected


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_equals_that_of_transformers(codec: TextCodec, reference, skip: bool) -> None:  # type: ignore[no-untyped-def]
    for text in TEXTS:
        token_ids = [*codec.encode(text), *codec.eos_ids]
        detokenizer = codec.detokenizer(skip)
        streamed = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        assert streamed == reference.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def test_sizes_and_end_tokens_are_the_models(codec: TextCodec) -> None:
    assert codec.vocab_size == 49152
    assert codec.context_length == 8192
    assert codec.token_strings(codec.eos_ids) == ["<|im_end|>"]
