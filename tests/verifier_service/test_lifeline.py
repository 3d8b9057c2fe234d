import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from verifier_service.lifeline import SILENCE_S, TOKEN_BYTES, Lifelines, hold_on

TOKEN = bytes(range(TOKEN_BYTES))
LIMIT_S = 20.0  # how long the tests wait for what comes much sooner

RANK = """
import sys, threading
from verifier_service.lifeline import end_process, hold_on
hold_on("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), end_process)
print("joined", flush=True)
threading.Event().wait(60)
"""


@contextmanager
def rank_process(port: int, rank: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RANK, str(port), str(rank), TOKEN.hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def told() -> "queue.Queue[str]":
    return queue.Queue()


def test_a_killed_rank_is_missed(told: "queue.Queue[str]") -> None:
    lines = Lifelines("127.0.0.1", 3, TOKEN, told.put)
    with rank_process(lines.port, 1), rank_process(lines.port, 2) as second:
        second.kill()
        assert told.get(timeout=LIMIT_S) == "rank 2 has ended"
    lines.close()


def test_a_stopped_rank_is_missed_though_its_socket_stays_open(told: "queue.Queue[str]") -> None:
    lines = Lifelines("127.0.0.1", 2, TOKEN, told.put)
    with rank_process(lines.port, 1) as rank:
        rank.send_signal(19)  # SIGSTOP
        assert told.get(timeout=LIMIT_S) == f"rank 1 was silent for {SILENCE_S} s"
    lines.close()


def test_a_rank_ends_when_rank_0_is_gone(told: "queue.Queue[str]") -> None:
    lines = Lifelines("127.0.0.1", 2, TOKEN, told.put)
    with rank_process(lines.port, 1) as rank:
        lines.close()
        assert rank.wait(timeout=LIMIT_S) == 1
    assert told.empty()


def test_a_rank_hears_the_silence_of_rank_0(told: "queue.Queue[str]") -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hold_on("127.0.0.1", silent.getsockname()[1], 1, TOKEN, told.put, silence_s=0.3)
        assert told.get(timeout=LIMIT_S) == "rank 0 was silent for 0.3 s"


def test_strangers_are_sent_away_and_not_missed(told: "queue.Queue[str]") -> None:
    lines = Lifelines("127.0.0.1", 2, TOKEN, told.put)
    gone = threading.Event()
    for token, rank in [(bytes(TOKEN_BYTES), 1), (TOKEN, 0), (TOKEN, 2)]:
        gone.clear()
        hold_on("127.0.0.1", lines.port, rank, token, lambda why, gone=gone: gone.set())
        assert gone.wait(LIMIT_S)
    assert told.empty()
    lines.close()
