"""Processes are killed in mid-stream; the text does not change. Clients go away; both pools are freed."""

import json
import os
import signal
import threading
import time

import httpx
import pytest

from tests.system.serving import MODEL, Server, pid_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "Count: one, two, three, four, five, six, seven, eight. Count again: one, two, three,"
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.7, "top_p": 0.95, "seed": 1234}


class Stream(threading.Thread):
    """Reads one streamed completion; `text` grows while it runs."""

    def __init__(self, server: Server, sampling: dict[str, float], max_tokens: int = 120) -> None:
        super().__init__(daemon=True)
        self.text, self.error, self.finish_reason = "", "", ""
        self._url = server.url
        self._body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._body |= sampling
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=180) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, chunk: dict) -> None:  # type: ignore[type-arg]
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.text += chunk["choices"][0]["text"]
        self.finish_reason = chunk["choices"][0]["finish_reason"] or self.finish_reason


def finished(stream: Stream) -> str:
    stream.join(timeout=180)
    assert not stream.is_alive()
    assert stream.error == ""
    assert stream.finish_reason == "length"
    return stream.text


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    return [finished(Stream(server, sampling)) for sampling in (GREEDY, SEEDED)]


def streaming(server: Server) -> list[Stream]:
    """A greedy and a seeded stream, both in full flow."""
    streams = [Stream(server, sampling) for sampling in (GREEDY, SEEDED)]
    wait_for(lambda: all(len(s.text) > 40 for s in streams), 60, "both streams flow")
    return streams


def wait_until_whole(server: Server) -> None:
    wait_for(lambda: len(server.replicas("verifier")) == 2 and len(server.replicas("drafter")) == 1, 120, "replaced")


def test_killing_the_drafter_does_not_change_the_text(server: Server, undisturbed: list[str]) -> None:
    wait_until_whole(server)
    streams = streaming(server)
    victim = next(iter(server.replicas("drafter")))
    os.kill(pid_of(victim), signal.SIGKILL)
    assert [finished(s) for s in streams] == undisturbed
    wait_for(lambda: victim not in server.replicas("drafter"), 60, "the dead drafter leaves the board")
    wait_until_whole(server)
    before = server.counter("outrider_spec_decode_num_accepted_tokens_total")
    assert finished(Stream(server, GREEDY)) == undisturbed[0]
    assert server.counter("outrider_spec_decode_num_accepted_tokens_total") > before, "its successor drafts"


def test_killing_a_verifier_does_not_change_the_text(server: Server, undisturbed: list[str]) -> None:
    wait_until_whole(server)
    streams = streaming(server)
    busy = {replica: n for replica, n in server.replicas("verifier").items() if n > 0}
    assert busy
    os.kill(pid_of(max(busy, key=lambda r: busy[r])), signal.SIGKILL)
    assert [finished(s) for s in streams] == undisturbed
    wait_until_whole(server)


def test_killing_the_router_does_not_change_the_text(server: Server, undisturbed: list[str]) -> None:
    wait_until_whole(server)
    streams = streaming(server)
    os.kill(pid_of(next(iter(server.replicas("router")))), signal.SIGKILL)
    assert [finished(s) for s in streams] == undisturbed
    wait_until_whole(server)


def test_a_client_that_goes_away_frees_both_pools_within_three_seconds(server: Server) -> None:
    wait_until_whole(server)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}

    def sessions() -> float:
        return sum(sum(server.replicas(pool).values()) for pool in ("verifier", "drafter"))

    wait_for(lambda: sessions() == 0, 30, "idle")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        wait_for(lambda: all(sum(server.replicas(p).values()) > 0 for p in ("verifier", "drafter")), 10, "both hold it")
    closed = time.monotonic()
    wait_for(lambda: sessions() == 0, 3.0 - (time.monotonic() - closed), "freed on both pools")
