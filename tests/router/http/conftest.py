"""A tiny model's text, a scripted generation, and the app in front of them."""

from collections.abc import Callable, Sequence

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.metrics import Metrics
from cluster.protocol.messages import FinishReason
from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.http.app import create_app
from router.http.chat_template import ChatTemplate
from router.http.front_door import FrontDoor
from router.http.text_codec import SamplingDefaults, TextCodec
from router.http.validate import Limits

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "tiny"
MAX_LEN = 64


def make_byte_tokenizer(texts: Sequence[str] = (), vocab_size: int = 300) -> Tokenizer:
    """A byte-level BPE tokenizer: 256 bytes, two special tokens, and what it learns from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Tokenizer]:
    return make_byte_tokenizer


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    tokenizer = make_byte_tokenizer(["the cat sat on the mat and the dog sat on the log"] * 4)
    eos = tokenizer.token_to_id("<|im_end|>")
    return TextCodec(tokenizer, ChatTemplate(TEMPLATE, {}), (eos,), SamplingDefaults(0.7, 0.9, 20))


@pytest.fixture
def generator() -> ScriptedGenerator:
    return ScriptedGenerator()


OpenDoor = Callable[..., FrontDoor]


@pytest.fixture
def open_door(codec: TextCodec, generator: ScriptedGenerator) -> OpenDoor:
    def build(strict: bool = False, **changes: object) -> FrontDoor:
        limits = Limits(MODEL, MAX_LEN, ("lookup",), strict)
        return FrontDoor(limits, codec, generator, Metrics(MODEL), **changes)  # type: ignore[arg-type]

    return build


Serving = Callable[..., httpx.AsyncClient]


@pytest.fixture
def serving(open_door: OpenDoor) -> Serving:
    def client(door: FrontDoor | None = None, **changes: object) -> httpx.AsyncClient:
        app = create_app(door or open_door(**changes))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://outrider")

    return client


@pytest.fixture
def say(codec: TextCodec, generator: ScriptedGenerator) -> Callable[..., list[int]]:
    """Script an answer: `text` in bursts of `burst` tokens, ended by `finish`; returns its token ids."""

    def script(text: str, burst: int = 3, finish: FinishReason = "stop") -> list[int]:
        ids = codec.encode(text, add_special_tokens=False)
        if finish == "stop":
            ids = [*ids, codec.eos_ids[0]]
        cuts = [ids[i : i + burst] for i in range(0, len(ids), burst)]
        generator.script = [
            Burst(cut, finish if i == len(cuts) - 1 else None, len(cut), len(cut) - 1) for i, cut in enumerate(cuts)
        ]
        return ids

    return script
