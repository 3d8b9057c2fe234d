"""The default target, its reference texts, and one in-process system with every drafter."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import DEFAULT_MODEL
from cluster.model_store import resolve
from cluster.protocol.messages import SamplingParams
from drafter_service.training.truncate import save_truncated
from router.http.text_codec import TextCodec
from tests.exactness.reference import Reference

TOKENS = 24
KEPT_LAYERS = 28  # of 30: a draft model that is right often enough to be accepted and wrong often enough to be rejected
TEXTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "def fibonacci(n):\n    ",
    "Roses are red, violets are blue, roses are red, violets are",
    "Water boils at a temperature of",
    '{"name": "Ada", "born": 1815, "field": "mathematics"}, {"name": "Alan", "born":',
    "Once upon a time, in a village by the sea, there lived",
    "Translate to French: Good morning. Answer:",
    "The three primary colours are red,",
    "To be, or not to be, that is the question: whether 'tis nobler",
    "a b c d e f g a b c d e f g a b c d",
    # Longer than the prefill chunk of 64 tokens.
    "The ship left the harbour at dawn and the captain wrote in his book that the wind was fair. " * 8 + "At noon the",
]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def prompts(model_dir: Path) -> list[list[int]]:
    codec = TextCodec.from_directory(model_dir)
    return [codec.encode(text) for text in TEXTS]


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Iterator[Reference]:
    loaded = Reference.load(model_dir)
    yield loaded
    print(f"\nnear-ties: {len(loaded.near_ties)}", *loaded.near_ties, sep="\n  ")


@pytest.fixture(scope="session")
def greedy_texts(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return [reference.greedy(prompt, TOKENS) for prompt in prompts]


@pytest.fixture(scope="session")
def small_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own first layers and head."""
    out = tmp_path_factory.mktemp("draft") / "first-layers"
    save_truncated(model_dir, KEPT_LAYERS, out)
    return out


@pytest.fixture(scope="session")
def tiny(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights so small that its best scores lie close together; the default model's tokeniser."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=49152, num_hidden_layers=2, max_position_embeddings=1024, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((model_dir / name).read_bytes())
    return path


class KnownTexts:
    """The next token of texts that are known as a whole: what an oracle drafter asks."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, tokens: Sequence[int], sampling: SamplingParams) -> int:
        known = list(tokens)
        return next((t[len(known)] for t in self.texts if len(t) > len(known) and t[: len(known)] == known), 0)
