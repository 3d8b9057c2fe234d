"""`make bench-quick`: how fast this system is against transformers' own generate, on this machine, in one run.

Each system lives in a worker process of its own and is idle while another is measured. They take turns prompt by
prompt, so that a noisy machine disturbs all alike; what counts are ratios of medians. Writes bench/results/quick.json.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.provenance import RESULTS, provenance
from cluster.placement import OPENMP

MODEL = "smollm2-135m-instruct"
PROMPTS = [
    "The history of the printing press begins in",
    "A good recipe for vegetable soup starts with",
    "The difference between a comet and an asteroid is",
    "My grandmother used to tell us that the winter of",
]
COPY_TEXT = (
    "The quick brown fox jumps over the lazy dog near the old stone bridge. Every morning the fisherman of the village"
    " walks to the harbor and looks at the boats. In the evening he sits by the fire and tells stories to the children."
)
COPY_PROMPT = f"Copy this text word for word:\n{COPY_TEXT}"
TOKENS = 64
STREAMS = 8


# --- workers: one JSON command per line in, one JSON answer per line out --------------------------------------------


_held: list[Any] = []  # context managers that live as long as their worker


def transformers_worker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    from cluster.model_store import resolve
    from router.http.text_codec import TextCodec

    directory = resolve(MODEL)
    codec = TextCodec.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def run(command: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([codec.encode(command["prompt"])])
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return {"seconds": time.perf_counter() - started, "tokens": out.shape[1] - ids.shape[1]}

    return run


def engine_worker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The engine alone, no router, no drafter: depth 0, one VerifyRequest per token and stream."""
    import torch

    from cluster.config import EngineConfig
    from cluster.model_store import resolve
    from cluster.protocol.messages import Epoch, OpenSession, SamplingParams, VerifyRequest, VerifyResult, as_tokens
    from outrider_kernels.paged_lm import PagedLM
    from router.http.text_codec import TextCodec
    from verifier_service.service import engine_for

    torch.set_num_threads(os.cpu_count() or 1)
    directory = resolve(MODEL)
    codec = TextCodec.from_directory(directory)
    engine = engine_for(PagedLM(directory, num_pages=1024), EngineConfig())
    epoch, numbers = Epoch(0, 1), iter(range(1_000_000))

    def run(command: dict[str, Any]) -> dict[str, Any]:
        lengths: dict[str, int] = {}
        started = time.perf_counter()
        for prompt in command["prompts"]:
            tokens, name = as_tokens(codec.encode(prompt)), f"s{next(numbers)}"
            engine.handle(OpenSession(name, epoch, tokens, len(tokens), SamplingParams(max_tokens=TOKENS)))
            engine.handle(VerifyRequest(name, epoch, 0, len(tokens), as_tokens()))
            lengths[name] = len(tokens)
        produced = 0
        while lengths:
            for result in engine.step():
                assert isinstance(result, VerifyResult)
                produced += 1
                lengths[result.session_id] += 1
                if result.finish_reason:
                    del lengths[result.session_id]
                else:
                    length = lengths[result.session_id]
                    engine.handle(VerifyRequest(result.session_id, epoch, result.block_id + 1, length, as_tokens()))
        return {"seconds": time.perf_counter() - started, "tokens": produced}

    return run


def system_worker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Router, prompt lookup and verifier in one process: with and without speculation."""
    from cluster.config import parse_config
    from cluster.local import local_system
    from cluster.model_store import resolve
    from cluster.protocol.messages import SamplingParams, Speculation
    from router.http.text_codec import TextCodec

    codec = TextCodec.from_directory(resolve(MODEL))
    loop = asyncio.new_event_loop()  # on a thread of its own: replicas go on renewing between commands
    threading.Thread(target=loop.run_forever, daemon=True).start()
    manager = local_system(parse_config({}))
    system = asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result()
    _held.append(manager)

    def run(command: dict[str, Any]) -> dict[str, Any]:
        text = codec.render_chat([{"role": "user", "content": command["prompt"]}])
        sampling = SamplingParams(max_tokens=TOKENS, stop_token_ids=codec.eos_ids)
        speculation = Speculation(enabled=command["speculation"])
        started = time.perf_counter()
        generation = system.generate(codec.encode(text, False), sampling, speculation)
        output = asyncio.run_coroutine_threadsafe(generation, loop).result()
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": len(output.token_ids),
            "rounds": len(output.rounds),
            "accepted": output.accepted,
            "drafted": output.drafted,
            "text": codec.decode(output.token_ids),
        }

    return run


def http_worker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A client of `outrider serve`: real processes, Ray, HTTP, streaming."""
    import httpx

    from cluster.config import parse_config
    from cluster.demo import free_port
    from cluster.launch import application, ray_cluster

    config = parse_config({"ingress": {"port": free_port(), "grpc_port": None}})
    cluster = ray_cluster(config, None)
    cluster.__enter__()
    served = application(config, lambda line: print(line, file=sys.stderr))
    url = served.__enter__()

    async def one(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"enabled": False, "report": True},
        }
        arrivals, last = [], {}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    arrivals.append(time.perf_counter())
        gaps = [1000 * (b - a) for a, b in itertools.pairwise(arrivals[:-1])]
        return {"tokens": last["usage"]["completion_tokens"], "gap_ms": statistics.median(gaps)} | last["metrics"][
            "rounds"
        ]

    async def all_of(prompts: Sequence[str]) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=300) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    def run(command: dict[str, Any]) -> dict[str, Any]:
        if command.get("stop"):
            served.__exit__(None, None, None)
            cluster.__exit__(None, None, None)
            return {}
        started = time.perf_counter()
        answers = asyncio.run(all_of(command["prompts"]))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": sum(a["tokens"] for a in answers), "first": answers[0]}

    return run


WORKERS = {
    "transformers": transformers_worker,
    "engine": engine_worker,
    "system": system_worker,
    "http": http_worker,
}


class Worker:
    """A worker process of this very file."""

    def __init__(self, kind: str) -> None:
        # The baseline runs as its users run it; ours with what a verifier replica sets (cluster/app.py).
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
        if kind != "transformers":
            environment |= OPENMP
        command = [sys.executable, __file__, "--worker", kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.ask({"ready": True}) is not None

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def serve_worker(kind: str) -> None:
    run: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("ready"):
            run = WORKERS[kind]()
            print("{}", flush=True)
            continue
        assert run is not None
        print(json.dumps(run(command)), flush=True)


# --- the run --------------------------------------------------------------------------------------------------------


def speed(samples: Sequence[dict[str, Any]]) -> float:
    """Median tokens per second."""
    return statistics.median(s["tokens"] / s["seconds"] for s in samples)


Plan = list[tuple[str, str, dict[str, Any]]]  # what is measured under which name: (name, worker, command)


def phases(with_http: bool) -> list[Plan]:
    """Each phase has its own workers, and nothing else runs. Within a phase all take turns."""
    eight = (PROMPTS * STREAMS)[:STREAMS]
    alone: Plan = []
    for prompt in PROMPTS:
        alone += [("transformers", "transformers", {"prompt": prompt}), ("engine", "engine", {"prompts": [prompt]})]
    alone.append(("engine x8", "engine", {"prompts": eight}))
    copying: Plan = [
        (name, "system", {"prompt": COPY_PROMPT, "speculation": speculation})
        for name, speculation in (("copy, depth 0", False), ("copy, lookup", True)) * 2
    ]
    served: Plan = []
    for prompt in PROMPTS:
        served.append(("transformers beside an idle Ray", "transformers", {"prompt": prompt}))
        served.append(("http", "http", {"prompts": [prompt]}))
    served.append(("http x8", "http", {"prompts": eight}))
    return [alone, copying, served] if with_http else [alone, copying]


def measure(repeats: int, with_http: bool) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    plans = phases(with_http)
    samples: dict[str, list[dict[str, Any]]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=(repeats + 1) * sum(map(len, plans)))
        for plan in plans:
            workers = {kind: Worker(kind) for kind in dict.fromkeys(kind for _, kind, _ in plan)}
            for number in range(repeats + 1):  # the first round warms up and does not count
                for name, kind, command in plan:
                    progress.update(task, advance=1, description=f"{name}, round {number} of {repeats}")
                    sample = workers[kind].ask(command)
                    if number:
                        samples.setdefault(name, []).append(sample)
            if "http" in workers:
                workers["http"].ask({"stop": True})
            for worker in workers.values():
                worker.close()
    return report(samples, with_http)


def report(samples: dict[str, list[dict[str, Any]]], with_http: bool) -> dict[str, Any]:
    rates = {name: round(speed(found), 2) for name, found in samples.items()}
    assert samples["copy, lookup"][-1]["text"] == samples["copy, depth 0"][-1]["text"]
    ratios = {
        "engine at depth 0 / transformers generate (aim 1.05)": rates["engine"] / rates["transformers"],
        "engine, 8 streams / 1 stream (aim 3.5)": rates["engine x8"] / rates["engine"],
        "prompt lookup / depth 0, copy-heavy prompt (aim 1.5)": rates["copy, lookup"] / rates["copy, depth 0"],
    }
    result: dict[str, Any] = {"tokens_per_s": rates}
    if with_http:
        ratios["through Ray and HTTP at depth 0 / transformers generate (aim 0.95)"] = (
            rates["http"] / rates["transformers"]
        )
        ratios["through Ray and HTTP, 8 streams / 1 stream (aim 3.5)"] = rates["http x8"] / rates["http"]
        result["ms_per_round_one_stream"] = round_parts([sample["first"] for sample in samples["http"]])
    result["ratios"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    last = samples["copy, lookup"][-1]
    result["copy_heavy"] = {key: last[key] for key in ("tokens", "rounds", "accepted", "drafted")}
    result["samples_per_median"] = len(samples["engine"])
    return result


def round_parts(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Where one round's time goes at depth 0: medians over all answers."""
    gap, whole, verify, step = (
        statistics.median(r[key] for r in rounds)
        for key in ("gap_ms", "median_round_ms", "median_verify_ms", "median_step_ms")
    )
    return {
        "between two events at the client": round(gap, 2),
        "target pass": round(step, 2),
        "transport and verifier service": round(verify - step, 2),
        "router": round(whole - verify, 2),
        "ingress, Serve proxy and HTTP": round(gap - whole, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds over all prompts (default 3)")
    parser.add_argument("--no-http", action="store_true", help="leave out Ray and HTTP")
    parser.add_argument("--out", type=Path, default=RESULTS / "quick.json")
    options = parser.parse_args()
    if options.worker:
        serve_worker(options.worker)
        return
    found = {"provenance": provenance()} | measure(options.repeats, not options.no_http)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "provenance"}, indent=2))


if __name__ == "__main__":
    main()
