import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.protocol.errors import InvalidRequest
from router.http.chat_template import ChatTemplate
from router.http.text_codec import SamplingDefaults, TextCodec


@pytest.fixture
def model_dir(tmp_path: Path, byte_tokenizer: Callable[..., Tokenizer]) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_end_tokens_may_be_one_several_or_only_named(model_dir: Path) -> None:
    write(model_dir, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    named = TextCodec.from_directory(model_dir).eos_ids
    write(model_dir, "config.json", {"eos_token_id": 5})
    one = TextCodec.from_directory(model_dir).eos_ids
    write(model_dir, "generation_config.json", {"eos_token_id": [7, 9]})
    several = TextCodec.from_directory(model_dir).eos_ids
    assert (named, one, several) == ((257,), (5,), (7, 9))


def test_sampling_defaults_come_from_the_generation_config(model_dir: Path) -> None:
    assert TextCodec.from_directory(model_dir).defaults == SamplingDefaults(1.0, 1.0, 0)
    write(model_dir, "generation_config.json", {"temperature": 0.2, "top_p": None, "top_k": 40})
    assert TextCodec.from_directory(model_dir).defaults == SamplingDefaults(0.2, 1.0, 40)


def test_the_models_own_sizes_are_used_where_it_says_them(model_dir: Path) -> None:
    write(model_dir, "config.json", {"text_config": {"vocab_size": 512, "max_position_embeddings": 2048}})
    codec = TextCodec.from_directory(model_dir)
    assert (codec.vocab_size, codec.context_length) == (512, 2048)


def test_the_template_file_wins_over_the_configs_and_the_default_of_several_is_used(model_dir: Path) -> None:
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]
    write(model_dir, "tokenizer_config.json", {"chat_template": named, "bos_token": "<s>"})
    assert TextCodec.from_directory(model_dir).render_chat([]) == "D<s>"
    write(model_dir, "chat_template.jinja", "F")
    assert TextCodec.from_directory(model_dir).render_chat([]) == "F"


def test_a_directory_without_a_tokenizer_or_with_a_broken_file_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        TextCodec.from_directory(tmp_path / "none")
    write(model_dir, "config.json", "{")
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        TextCodec.from_directory(model_dir)


def test_a_model_without_a_template_says_so(byte_tokenizer: Callable[..., Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(byte_tokenizer()).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[3].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_fault(template: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source, {}).render([{"c": "<é>"}, {"c": "no"}]) == '{"c": "<é>"}4'


def test_the_vocabulary_hash_changes_when_two_tokens_change_places(byte_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = byte_tokenizer(["the cat the cat"])
    table = json.loads(tokenizer.to_str())
    vocab = table["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    swapped = TextCodec(Tokenizer.from_str(json.dumps(table)))
    assert TextCodec(tokenizer).vocab_hash() != swapped.vocab_hash()
    assert TextCodec(tokenizer).vocab_hash() == TextCodec(byte_tokenizer(["the cat the cat"])).vocab_hash()
