"""A small OpenAI-compatible server whose speculation is honest, or lies in one named way.

Its tokens are characters and its law is a `ScriptedLaw` of the newest ones. Speculation is played: the text is chosen
token by token by the law, and all but each block's own last token count as accepted drafts. So every lie below is the
whole difference between speculating and not.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.simulator.scripted_target import ScriptedLaw

VOCABULARY = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
EOS = len(VOCABULARY)
CHAT_LENGTH = 20  # tokens after which a chat's answer ends by itself
CONTEXT = 32  # newest tokens that count
MODEL = "toy"

Lie = Literal[
    "",
    "another greedy token",
    "a nearly tied greedy token",
    "seed ignored",
    "unseeded is constant",
    "colder samples",
    "stop found late",
    "goes past max_tokens",
    "logprobs of the drafter",
    "usage counts rounds",
    "penalty counts rounds",
    "bans only the first of a block",
    "stream loses its end",
    "never speculates",
    "fails when speculating",
]


@dataclass
class Toy:
    """What the server knows and refuses. `lie` is told only while speculating."""

    lie: Lie = ""
    refuses: frozenset[str] = frozenset()  # fields answered with 400
    ignores: frozenset[str] = frozenset()  # fields without effect
    tied: bool = False  # the law's two best are nearly tied at every tenth token
    reports_acceptance: bool = True
    keys: Iterator[int] = field(default_factory=lambda: itertools.count(10**6))
    law: ScriptedLaw = field(
        default_factory=lambda: ScriptedLaw(vocab_size=EOS + 1, seed=3, spread=40.0, window=CONTEXT)
    )

    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self.app())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.completions, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": MODEL}]})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": encode((await request.json())["prompt"])})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        for name in self.refuses & body.keys():
            return JSONResponse({"error": {"message": f"{name}: not supported", "param": name}}, 400)
        body = {name: value for name, value in body.items() if name not in self.ignores}
        said = body.get("speculation", {})
        if not isinstance(said.get("enabled", True), bool) or said.get("acceptance", "auto") != "auto":
            return JSONResponse({"error": {"message": "speculation: wrong"}}, 422)
        depth = said.get("max_depth", 4) if said.get("enabled", True) else 0
        if depth and self.lie == "fails when speculating":
            return JSONResponse({"error": {"message": "internal error"}}, 500)
        text = _Text(self if depth else replace(self, lie=""), body, 0 if self.lie == "never speculates" else depth)
        text.write()
        chat = "messages" in body
        if not body.get("stream"):
            return JSONResponse(
                {"choices": [text.choice(0, len(text.tokens), chat, whole=True)], "usage": text.usage()}
            )
        return StreamingResponse(text.events(chat), media_type="text/event-stream")


def encode(text: str) -> list[int]:
    """Characters that the vocabulary lacks are given some other one."""
    return [found if (found := VOCABULARY.find(char)) >= 0 else ord(char) % EOS for char in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens if token != EOS)


def named(raw: NDArray[np.float64]) -> dict[str, float]:
    """Log-probabilities by token, best first."""
    values = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    return {decode([int(i)]): float(values[i]) for i in np.argsort(values)[::-1]}


class _Text:
    """One answer."""

    def __init__(self, toy: Toy, body: dict[str, Any], depth: int) -> None:
        self.toy, self.body, self.depth = toy, body, depth
        self.chat = "messages" in body
        prompt = body["prompt"] if not self.chat else "".join(m["content"] for m in body["messages"])
        self.prompt = encode(prompt)
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, float]] = []
        self.rounds = 1
        self.accepted = 0
        self.finish_reason = ""
        self.seed = body.get("seed")
        if self.seed is None:
            self.seed = 7 if toy.lie == "unseeded is constant" else next(toy.keys)
        elif toy.lie == "seed ignored":
            self.seed = next(toy.keys)

    # A block is `depth` drafts and the target's own token; the first token of all comes with the prefill.

    def drafted(self, place: int) -> bool:
        return place > 0 and (place - 1) % (self.depth + 1) < self.depth

    def block_ends(self, place: int) -> bool:
        return place % (self.depth + 1) == 0

    def write(self) -> None:
        limit = self.body["max_tokens"]
        while not self.finish_reason:
            place = len(self.tokens)
            token = self.choose(place)
            self.tokens.append(token)
            self.accepted += self.drafted(place)
            self.rounds += self.block_ends(place)
            late = self.toy.lie == "goes past max_tokens" and not self.block_ends(place)
            if token in self.ends(place):
                self.finish_reason = "stop"
            elif stop := self.stop_in(place):
                self.finish_reason = "stop"
                self.cut(stop)
            elif place + 1 >= limit and not late:
                self.finish_reason = "length"

    def ends(self, place: int) -> set[int]:
        eos = set() if self.body.get("ignore_eos") else {EOS}
        return eos | set(self.body.get("stop_token_ids", []))

    def stop_in(self, place: int) -> str:
        if self.toy.lie == "stop found late":
            if not self.block_ends(place):
                return ""
            # It looks at the newest characters only, when the block is already out.
            shown = decode(self.tokens)
            return next((s for s in self.body.get("stop", []) if shown.endswith(s)), "")
        return next((s for s in self.body.get("stop", []) if s in decode(self.tokens)), "")

    def cut(self, stop: str) -> None:
        kept = decode(self.tokens).index(stop)
        self.tokens, self.logprobs = self.tokens[:kept], self.logprobs[:kept]
        self.accepted = min(self.accepted, kept)

    def choose(self, place: int) -> int:
        raw = self.toy.law.logits([*self.prompt, *self.tokens][-CONTEXT:]).astype(np.float64)
        best, second = np.argsort(raw)[::-1][:2]
        if self.toy.tied and place % 10 == 7:
            raw[second] = raw[best] - 1e-5
        self.note(raw, place)
        scores = self.processed(raw.copy(), place)
        temperature = self.body.get("temperature", 1.0)
        if temperature == 0:
            wrong = self.drafted(place) and place % 10 == 7
            if wrong and self.toy.lie in ("another greedy token", "a nearly tied greedy token"):
                return int(np.argsort(scores)[-2])
            return int(np.argmax(scores))
        colder = self.toy.lie == "colder samples" and self.drafted(place)
        return self.sample(scores / (temperature * (0.5 if colder else 1.0)), place)

    def processed(self, scores: NDArray[np.float64], place: int) -> NDArray[np.float64]:
        body = self.body
        seen = self.tokens
        if self.toy.lie == "penalty counts rounds":
            seen = seen[: place - (place - 1) % (self.depth + 1)] if place else []
        counts = np.bincount(seen, minlength=EOS + 1)
        scores -= body.get("frequency_penalty", 0.0) * 3 * counts + body.get("presence_penalty", 0.0) * 6 * (counts > 0)
        penalty = body.get("repetition_penalty", 1.0)
        scores[counts > 0] = np.where(scores > 0, scores / penalty, scores * penalty)[counts > 0]
        if not (self.toy.lie == "bans only the first of a block" and self.drafted(place)):
            for token, bias in body.get("logit_bias", {}).items():
                scores[int(token)] += bias
        over = self.chat and place >= CHAT_LENGTH and not body.get("ignore_eos") and place >= body.get("min_tokens", 0)
        scores[EOS] = 1e3 if over else -1e3
        return scores

    def sample(self, scores: NDArray[np.float64], place: int) -> int:
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        order = np.argsort(weights)[::-1]
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= self.body.get("top_p", 1.0)]] = 0
        # Noise keyed by (seed, place): the text does not depend on the blocks.
        uniform = np.random.default_rng((self.seed % 2**64, place)).random(len(weights))
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(weights) - np.log(-np.log(uniform))))

    def note(self, raw: NDArray[np.float64], place: int) -> None:
        if self.toy.lie == "logprobs of the drafter" and self.drafted(place):
            raw = raw * 0.9
        self.logprobs.append(named(raw))

    # What is sent.

    def usage(self) -> dict[str, Any]:
        completion = self.rounds if self.toy.lie == "usage counts rounds" else len(self.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt) + completion,
        }
        if self.toy.reports_acceptance:
            details = {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": 0}
            usage["completion_tokens_details"] = details
        return usage

    def choice(self, start: int, end: int, chat: bool, whole: bool) -> dict[str, Any]:
        tokens = self.tokens[start:end]
        text = (self.body["prompt"] if self.echoes and not start else "") + decode(tokens)
        shape = {"message" if whole else "delta": {"content": text}} if chat else {"text": text}
        return {"index": 0, **shape, "logprobs": self.shown_logprobs(start, tokens, chat), "finish_reason": None} | (
            {"finish_reason": self.finish_reason} if end >= len(self.tokens) else {}
        )

    def shown_logprobs(self, start: int, tokens: list[int], chat: bool) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        names = [decode([token]) for token in tokens]
        values: list[Any] = [self.logprobs[start + i][name] for i, name in enumerate(names)]
        tops: list[Any] = [dict(itertools.islice(self.logprobs[start + i].items(), 2)) for i in range(len(names))]
        if self.echoes and not start:
            read = [None, *(named(row) for row in self.toy.law.logits_of_rows(*self.prompt_rows()).astype(np.float64))]
            ours = [decode([token]) for token in self.prompt]
            names = ours + names
            values = [row and row[name] for row, name in zip(read, ours, strict=True)] + values
            tops = [row and dict(itertools.islice(row.items(), 2)) for row in read] + tops
        if not chat:
            return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        entries = zip(names, values, tops, strict=True)
        return {
            "content": [
                {"token": n, "logprob": v, "top_logprobs": [{"token": t, "logprob": lp} for t, lp in top.items()]}
                for n, v, top in entries
            ]
        }

    @property
    def echoes(self) -> bool:
        return bool(self.body.get("echo")) and not self.chat

    def prompt_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.array(self.prompt, np.int64), np.arange(len(self.prompt) - 1)

    def events(self, chat: bool) -> Iterator[str]:
        size = self.depth + 1
        sent = len(self.tokens) - (2 if self.toy.lie == "stream loses its end" else 0)
        for start in range(0, max(1, sent), size):
            end = min(start + size, sent)
            choice = self.choice(start, len(self.tokens) if start + size >= sent else end, chat, whole=False)
            if self.toy.lie == "stream loses its end" and start + size >= sent:
                choice = self.choice(start, end, chat, whole=False) | {"finish_reason": self.finish_reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': self.usage()})}\n\n"
        yield "data: [DONE]\n\n"
