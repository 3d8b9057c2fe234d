import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import DraftRequest, Epoch, SamplingParams, as_tokens
from drafter_service.draft_model import DraftModel
from drafter_service.training.truncate import save_truncated
from outrider_kernels.paged_lm import PagedLM


def save_target(directory, *, tied: bool, shard_size: str = "1GB"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text("{}")
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return save_target(directory, tied=True), directory


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_the_copy_computes_what_the_targets_first_layers_compute(tmp_path, tied, shard_size):
    model = save_target(tmp_path / "target", tied=tied, shard_size=shard_size)
    save_truncated(tmp_path / "target", 2, tmp_path / "draft")
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", local_files_only=True).eval()
    model.model.layers = model.model.layers[:2]
    ids = torch.tensor([[5, 17, 80, 3]])
    with torch.inference_mode():
        torch.testing.assert_close(copy(ids).logits, model(ids, use_cache=False).logits)


def test_configuration_and_tokenizer_come_along(target, tmp_path):
    _, directory = target
    save_truncated(directory, 1, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["vocab_size"] == 97
    assert len(config.get("layer_types") or [0]) == 1
    assert (tmp_path / "draft" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_more_layers_than_there_are_is_refused(target, tmp_path, layers):
    with pytest.raises(InvalidRequest, match=r"within 1\.\.4"):
        save_truncated(target[1], layers, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"config\.json|configuration"):
        save_truncated(tmp_path, 1, tmp_path / "draft")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    with pytest.raises(InvalidRequest, match="layers"):
        save_truncated(tmp_path, 1, tmp_path / "draft")


def test_the_target_is_never_overwritten(target):
    with pytest.raises(InvalidRequest, match="own directory"):
        save_truncated(target[1], 2, target[1])


def test_a_truncated_target_drafts_what_transformers_generates_with_it(target, tmp_path):
    save_truncated(target[1], 2, tmp_path / "draft")
    drafter = DraftModel(PagedLM(tmp_path / "draft", num_pages=32, page_size=4), vocab_size=97, prefill_rows=4)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", local_files_only=True).eval()
    texts = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [90]}
    for grown in (0, 1):
        requests = [
            DraftRequest(name, Epoch(0, 0), grown, len(text), 1, as_tokens(text), 6, SamplingParams(max_tokens=9))
            for name, text in texts.items()
        ]
        for text, answer in zip(texts.values(), drafter.draft(requests), strict=True):
            ids = torch.tensor([text])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
            )
            assert answer.token_ids.tolist() == expected[0, len(text) :].tolist()
        texts = {"a": [*texts["a"], 11], "b": [*texts["b"], *answer.token_ids.tolist()[:3], 50]}
