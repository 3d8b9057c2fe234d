"""What `numerics: invariant` costs, and how often a near-tie falls another way under `fast`.

The same prompts are run alone, among others, with drafts and with another prefill chunk. A text that differs from its
first run counts one flip: from there on it is another text. Writes bench/results/numerics.json.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.provenance import RESULTS, provenance
from cluster.config import Config, parse_config
from cluster.local import LocalSystem, local_system
from cluster.model_store import resolve
from cluster.protocol.messages import SamplingParams, Speculation
from router.http.text_codec import TextCodec

MODEL = "smollm2-135m-instruct"
SUBJECTS = ["the sea", "bread", "a bridge", "winter", "trains", "the moon", "a library", "glass", "bees", "salt",
            "a violin", "maps", "rain", "a lighthouse", "paper", "the desert"]  # fmt: skip
FORMS = ["Write a short story about {}.", "Explain to a child how {} came to be, step by step, with an example."]
LONG = "The ship left the harbour at dawn and the captain wrote in his book that the wind was fair. " * 26


@dataclass(frozen=True)
class Way:
    chunk: int
    concurrency: int
    depth: int

    def __str__(self) -> str:
        return f"chunk {self.chunk}, {self.concurrency} at once, depth {self.depth}"


FIRST = Way(256, 1, 0)
OTHERS = [Way(256, 8, 0), Way(256, 8, 4), Way(24, 8, 0)]


def config_of(numerics: str, chunk: int) -> Config:
    engine = {"numerics": numerics, "prefill_chunk_tokens": chunk, "kv_cache_tokens": 16384}
    drafting = {"depth_policy": {"kind": "fixed", "depth": 4, "bypass": False}}
    return parse_config({"target": {"engine_config": engine}, "router": drafting})


async def texts_of(system: LocalSystem, prompts: Sequence[Sequence[int]], way: Way, tokens: int) -> list[list[int]]:
    places = asyncio.Semaphore(way.concurrency)
    speculation = Speculation(enabled=way.depth > 0)

    async def one(prompt: Sequence[int]) -> list[int]:
        async with places:
            return (await system.generate(prompt, SamplingParams(max_tokens=tokens), speculation)).token_ids

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def flips(first: list[list[int]], other: list[list[int]]) -> tuple[int, int]:
    """(texts that differ, tokens compared: up to and including the first difference)."""
    differing, compared = 0, 0
    for a, b in zip(first, other, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        differing += at is not None
        compared += len(a) if at is None else at + 1
    return differing, compared


async def measure(numerics: str, prompts: list[list[int]], long: list[int], tokens: int) -> dict[str, object]:
    found: dict[str, object] = {}
    differing, compared = 0, 0
    async with local_system(config_of(numerics, FIRST.chunk)) as system:
        started = time.perf_counter()
        first = await texts_of(system, prompts, FIRST, tokens)
        found["tokens_per_s alone"] = round(sum(map(len, first)) / (time.perf_counter() - started), 1)
        prefills = []
        for shift in range(5):
            started = time.perf_counter()
            await texts_of(system, [[shift + 100, *long]], FIRST, 1)  # no prefix that was seen before
            prefills.append(time.perf_counter() - started)
        found[f"ms prefill of {len(long) + 1} tokens"] = round(1000 * statistics.median(prefills), 1)
    for chunk in sorted({way.chunk for way in OTHERS}):
        async with local_system(config_of(numerics, chunk)) as system:
            for way in (way for way in OTHERS if way.chunk == chunk):
                started = time.perf_counter()
                texts = await texts_of(system, prompts, way, tokens)
                found[f"tokens_per_s {way}"] = round(sum(map(len, texts)) / (time.perf_counter() - started), 1)
                more = flips(first, texts)
                differing, compared = differing + more[0], compared + more[1]
    found |= {"flips": differing, "tokens compared": compared}
    found["flips per 1000 tokens"] = round(1000 * differing / compared, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each text")
    args = parser.parse_args()
    codec = TextCodec.from_directory(resolve(MODEL))
    asked = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    prompts = [codec.encode(codec.render_chat([{"role": "user", "content": text}]), False) for text in asked]
    result: dict[str, object] = {"provenance": provenance()}
    for numerics in ("fast", "invariant"):
        result[numerics] = asyncio.run(measure(numerics, prompts, codec.encode(LONG), args.tokens))
        print(numerics, json.dumps(result[numerics], indent=1))
    (RESULTS / "numerics.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
