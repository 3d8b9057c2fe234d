"""`outrider demo`: the whole system on this machine, one answer with and without speculation, figures, stop."""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.config import Config, parse_config
from cluster.launch import application, ray_cluster
from cluster.model_store import resolve

# Prompt lookup drafts what has been said before, so an answer that repeats parts of its prompt shows what it gains.
PROMPT = """Copy this text word for word:
The quick brown fox jumps over the lazy dog near the old stone bridge. Every morning the fisherman of the village \
walks to the harbor and looks at the boats. In the evening he sits by the fire and tells stories to the children, \
and when the moon stands over the hills they walk home along the river."""
MAX_TOKENS = 128


@dataclass
class Answer:
    """What a client saw of one streamed answer."""

    text: str = ""
    ttft_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Of the decode phase: the first token is prefill's."""
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


def run_demo(report: Callable[[str], None]) -> bool:
    """Whether both texts are the same. Raises Unavailable when the application does not start."""
    config = parse_config({"ingress": {"port": free_port(), "grpc_port": None}})
    resolve(config.target.model_loading_config.model_source)
    with ray_cluster(config, None), application(config, report) as url:
        report(f"ready: {url}\n")
        print(f"> {PROMPT}\n")
        with_drafts = _stream(url, config, speculate=True, echo=True)
        print("\n")
        report("once more without speculation ...")
        without = _stream(url, config, speculate=False, echo=False)
        _print_figures(with_drafts, without)
        report("stopping ...")
    return with_drafts.text == without.text


def _stream(url: str, config: Config, speculate: bool, echo: bool) -> Answer:
    body = {
        "model": config.target.model_loading_config.model_id,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": speculate, "report": True},
    }
    answer, started, first = Answer(), time.perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter()
                answer.text += text
                if echo:
                    print(text, end="", flush=True)
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            answer.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or answer.speculation
    answer.ttft_s, answer.decode_s = first - started, time.perf_counter() - first
    return answer


def _print_figures(with_drafts: Answer, without: Answer) -> None:
    figures = with_drafts.speculation
    print(f"tokens                {with_drafts.tokens}")
    print(f"rounds                {figures['num_spec_steps']} with drafts")
    print(f"acceptance length     {figures['mean_acceptance_length']:.2f} tokens per round, bonus included")
    print(f"draft acceptance      {figures['draft_acceptance_rate']:.0%} of {figures['num_draft_tokens']} draft tokens")
    print(f"with speculation      {with_drafts.tokens_per_s:.1f} tokens/s (first after {with_drafts.ttft_s:.2f} s)")
    print(f"without speculation   {without.tokens_per_s:.1f} tokens/s (first after {without.ttft_s:.2f} s)")
    print(f"ratio                 {with_drafts.tokens_per_s / without.tokens_per_s:.2f}")
    print(f"same text             {'yes' if with_drafts.text == without.text else 'NO'}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
