"""Round trip of one batch of verification requests between two processes over gRPC; JSON on stdout.

    python bench/transport_rtt.py [--sessions 32] [--depth 8] [--rounds 2000]

Includes what a round includes: encoding and decoding at both ends, and both event loops. The defaults make a frame of
about 2 KB.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

from cluster.protocol.codec import decode, encode
from cluster.protocol.grpc_carrier import GrpcTransport
from cluster.protocol.messages import Epoch, Hello, VerifyRequest, as_tokens
from cluster.protocol.transport import Link

SECRET = b"only for this measurement"
WARM_UP = 100


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


async def serve() -> None:
    listener = await GrpcTransport("127.0.0.1", SECRET).listen(Hello("verifier", "echo"), echo)
    print(listener.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the measuring process ends
    await listener.close()


async def measure(address: str, batch: list[VerifyRequest], rounds: int) -> list[float]:
    link = await GrpcTransport("127.0.0.1", SECRET).connect(address, Hello("router", "bench"))
    took_ms = []
    for _ in range(WARM_UP + rounds):
        start = time.perf_counter()
        await link.send(batch)
        await link.receive()
        took_ms.append((time.perf_counter() - start) * 1e3)
    await link.close()
    return took_ms[WARM_UP:]


def codec_ms(batch: list[VerifyRequest], rounds: int) -> float:
    """Encoding and decoding the batch once."""
    took_ms = []
    for _ in range(rounds):
        start = time.perf_counter()
        decode(encode(batch))
        took_ms.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32, help="messages in the batch")
    parser.add_argument("--depth", type=int, default=8, help="draft tokens per message")
    parser.add_argument("--rounds", type=int, default=2000, help="round trips measured, after 100 to warm up")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # the other process
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    batch = [
        VerifyRequest(f"session-{number}", Epoch(1, 1), 1, 500, as_tokens(range(options.depth)))
        for number in range(options.sessions)
    ]
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        took_ms = asyncio.run(measure(peer.stdout.readline().strip(), batch, options.rounds))
    cuts = statistics.quantiles(took_ms, n=100)
    result = {
        "carrier": "grpc",
        "frame_bytes": len(encode(batch)),
        "rounds": options.rounds,
        "median_ms": round(statistics.median(took_ms), 4),
        "p90_ms": round(cuts[89], 4),
        "p99_ms": round(cuts[98], 4),
        "codec_ms": round(codec_ms(batch, options.rounds), 4),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
