"""Everything about one model's text: tokens from text and chats, text from tokens, its end tokens and defaults.

Reads a Hugging Face model directory once, with the tokenizers library alone. Knows nothing of requests.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from cluster.protocol.errors import InvalidRequest
from cluster.protocol.handshake import vocab_hash
from router.http.chat_template import ChatTemplate
from router.http.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets: the model's generation_config, else OpenAI's values. top_k 0 is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextCodec:
    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        eos_ids: Sequence[int] = (),
        defaults: SamplingDefaults | None = None,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> None:
        tokenizer.no_truncation()  # a tokenizer.json may carry its training limits
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.defaults = defaults or SamplingDefaults()
        # The model's own count; the token table may be shorter because models pad it.
        self.vocab_size = vocab_size or tokenizer.get_vocab_size()
        self.context_length = context_length  # tokens; None = the model does not say
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}  # filled on demand, bounded by the vocabulary

    @classmethod
    def from_directory(cls, model_dir: Path) -> "TextCodec":
        """Raises InvalidRequest when the directory has no tokenizer.json or a file in it cannot be read."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequest(f"{model_dir} has no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(path))
        texts = _read_json(model_dir / "tokenizer_config.json")
        config = _read_json(model_dir / "config.json")
        config = config.get("text_config") or config
        generation = _read_json(model_dir / "generation_config.json")
        return cls(
            tokenizer,
            _chat_template(model_dir, texts),
            _eos_ids(generation, config, texts, tokenizer),
            _defaults(generation),
            config.get("vocab_size"),
            config.get("max_position_embeddings"),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The batch call releases the interpreter, the single one does not.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text, special tokens included: encode it without adding more. Raises InvalidRequest."""
        if self._chat_template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", "messages")
        return self._chat_template.render(messages, add_generation_prompt)

    def vocab_hash(self) -> str:
        """Of the token table in the order of ids, added tokens included: what a drafter's must equal."""
        size = self._tokenizer.get_vocab_size()
        return vocab_hash(self._tokenizer.id_to_token(token_id) or "" for token_id in range(size))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as it stands in the vocabulary."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer for one answer."""
        if self._byte_level:
            hidden = self._special_ids if skip_special_tokens else frozenset()
            return ByteDetokenizer(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id))
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Where in `text`, which they stand for, each token begins; tokens that were added before the text begin at
        0."""
        detokenizer, begins, length = self.detokenizer(skip_special_tokens=False), [], 0
        for token_id in token_ids:
            begins.append(length)
            length += len(detokenizer.push(token_id))
        added = max(0, length + len(detokenizer.flush()) - len(text))
        return [max(0, begin - added) for begin in begins]

    def token_bytes(self, token_id: int) -> bytes:
        """What the token alone stands for, special tokens included; a part of a character perhaps."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            known = self._bytes_of[token_id] = _bytes_of_token(token) if self._byte_level else _bytes_of_piece(token)
        return known


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _bytes_of_token(token: str) -> bytes:
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()  # an added token, which stands for itself


def _bytes_of_piece(token: str) -> bytes:
    """Of SentencePiece vocabularies: a byte that no piece covers, or text with its spaces marked."""
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _chat_template(model_dir: Path, texts: Mapping[str, Any]) -> ChatTemplate | None:
    path = model_dir / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else texts.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return ChatTemplate(source, _special_tokens(texts)) if source else None


def _special_tokens(texts: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, which tokenizer_config.json holds as strings or as objects with `content`."""
    tokens: dict[str, str] = {}
    for name, value in texts.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], texts: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        eos = tokenizer.token_to_id(_special_tokens(texts).get("eos_token", ""))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    def value(name: str, otherwise: float) -> float:
        given = generation.get(name)
        return otherwise if given is None else given

    return SamplingDefaults(
        float(value("temperature", 1.0)),
        float(value("top_p", 1.0)),
        max(0, int(value("top_k", 0))),
        float(value("min_p", 0.0)),
        float(value("repetition_penalty", 1.0)),
    )
