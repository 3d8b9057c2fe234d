"""`outrider generate`: one prompt through the whole system in this process, streamed to the terminal."""

import secrets
import sys
import time
from dataclasses import dataclass

from cluster.config import Config
from cluster.local import LocalSystem, local_system
from cluster.model_store import resolve
from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import SamplingParams, Speculation, as_tokens
from router.http.text_codec import TextCodec


@dataclass(frozen=True)
class GenerateOptions:
    prompt: str
    max_tokens: int
    temperature: float  # 0 = greedy
    seed: int | None
    depth: int | None  # None = as configured
    drafter: str  # "" = the configuration's first
    raw: bool  # continue the prompt as it stands


async def run_generate(config: Config, options: GenerateOptions) -> None:
    """Raises InvalidRequest for a prompt that does not fit or an unknown drafter."""
    codec = TextCodec.from_directory(resolve(config.target.model_loading_config.model_source))
    names = [drafter.name for drafter in config.drafters]
    if options.drafter and options.drafter not in names:
        raise InvalidRequest(f"--drafter {options.drafter!r}: the configuration has {names}", "drafter")
    print("loading ...", file=sys.stderr, flush=True)
    async with local_system(config) as system:
        await _stream(system, codec, options)


async def _stream(system: LocalSystem, codec: TextCodec, options: GenerateOptions) -> None:
    text = options.prompt if options.raw else codec.render_chat([{"role": "user", "content": options.prompt}])
    prompt = codec.encode(text, add_special_tokens=options.raw)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        stop_token_ids=codec.eos_ids,
        key=secrets.randbits(64) if options.seed is None else options.seed & (2**64 - 1),
    )
    speculation = Speculation(options.depth != 0, options.depth or None, options.drafter)
    detokenizer = codec.detokenizer()
    tokens = rounds = drafted = accepted = 0
    started, first_s = time.perf_counter(), 0.0
    async for burst in system.client.generate("generate", as_tokens(prompt), sampling, speculation):
        first_s = first_s or time.perf_counter()
        print("".join(detokenizer.push(int(token)) for token in burst.token_ids), end="", flush=True)
        tokens += len(burst.token_ids)
        if burst.stats is not None:
            rounds, drafted, accepted = rounds + 1, drafted + burst.stats.drafted, accepted + burst.stats.accepted
    print(detokenizer.flush(), flush=True)
    decode_s = time.perf_counter() - first_s
    print(
        f"{tokens} tokens in {rounds} rounds ({tokens / max(1, rounds):.2f} per round), {accepted} of {drafted} draft"
        f" tokens accepted, first token after {first_s - started:.2f} s,"
        f" then {(tokens - 1) / decode_s if decode_s else 0.0:.1f} tokens/s",
        file=sys.stderr,
    )
