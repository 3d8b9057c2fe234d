"""Pools follow their own load under Ray Serve: a replica that goes cuts no stream, one that is needed comes."""

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.system.serving import MODEL, Server, start_server, stop_server, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS, MORE_STREAMS = 16, 24
SCALING = {
    "min_replicas": 1,
    "initial_replicas": 2,
    "max_replicas": 2,
    "target_load": 0.3,  # of 64 sessions: 16 fit one replica, 24 do not
    "upscale_delay_s": 2,
    "downscale_delay_s": 30,
}
POOL = {"autoscaling_config": SCALING, "drain_s": 300}
CONFIG = {
    "target": {
        "deployment_config": POOL,
        # Which replica computes a stream and beside whom must not matter to the last bit.
        "engine_config": {"threads": 1, "numerics": "invariant", "max_sessions": 64},
    },
    "drafters": [{"name": "lookup", "kind": "prompt_lookup", "deployment_config": POOL}],
    "router": {"depth_policy": {"kind": "fixed", "depth": 2, "bypass": False}},
}


@pytest.fixture(scope="module")
def scaling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("scaling"), CONFIG)
    yield running
    stop_server(running)


class Streams:
    """Several at once; `texts` once all are done."""

    def __init__(self, server: Server, count: int, max_tokens: int) -> None:
        self._url, self._tokens = server.url, max_tokens
        self.texts, self.ends = [""] * count, [""] * count
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> list[str]:
        for thread in self._threads:
            thread.join(timeout=600)
        assert self.ends == ["length"] * len(self.ends)
        return self.texts

    def _read(self, index: int) -> None:
        body = {"model": MODEL, "prompt": f"Story number {index}: Once upon a time", "max_tokens": self._tokens}
        body |= {"ignore_eos": True, "stream": True, "temperature": 0.7 * (index % 2), "seed": index}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.texts[index] += choice["text"]
                    self.ends[index] = choice["finish_reason"] or self.ends[index]


def test_scaling_down_cuts_no_stream_and_scaling_up_follows_the_load(scaling_server: Server) -> None:
    def sizes() -> tuple[int, int]:
        return len(scaling_server.replicas("verifier")), len(scaling_server.replicas("drafter"))

    assert sizes() == (2, 2)
    streams = Streams(scaling_server, STREAMS, max_tokens=600)
    wait_for(lambda: min(scaling_server.replicas("verifier").values()) > 0, 60, "both verifiers have streams")
    wait_for(lambda: sizes() == (1, 1), 240, "one verifier and one drafter leave")
    assert streams.running, "they left while streams ran"
    disturbed = streams.finish()
    assert Streams(scaling_server, STREAMS, max_tokens=600).finish() == disturbed

    more = Streams(scaling_server, MORE_STREAMS, max_tokens=500)
    wait_for(lambda: sizes()[0] == 2, 180, "a second verifier comes")
    assert more.running
    started = time.monotonic()
    late = Streams(scaling_server, 4, max_tokens=40)
    wait_for(lambda: min(scaling_server.replicas("verifier").values()) > 0, 60, "it gets streams")
    late.finish()
    more.finish()
    print(f"the late streams and the rest took {time.monotonic() - started:.0f} s")
