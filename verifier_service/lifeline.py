"""How the ranks of one target notice that one of them is gone: a socket from each rank to rank 0, and a beat on it.

Knows nothing of passes. Rank 0 hears of the end of a rank at once and of its silence within SILENCE_S; a rank that
loses rank 0 ends. Beats come from a thread of their own, so a long pass is no silence.
"""

import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

logger = logging.getLogger(__name__)

BEAT_S = 0.25
SILENCE_S = 3.0
TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sI")  # the target's token, the rank


@dataclass(slots=True)
class _Peer:
    socket: socket.socket
    heard_s: float
    hello: bytes = b""
    rank: int = -1  # until it has said who it is


class Lifelines:
    """Rank 0's end. `lost(why)` is called once, on the watching thread, when a rank that had joined is gone."""

    def __init__(
        self,
        host: str,
        size: int,
        token: bytes,
        lost: Callable[[str], None],
        *,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._token, self._lost = size, token, lost
        self._silence_s, self._clock = silence_s, clock
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: list[_Peer] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank lifelines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From here on nobody is missed, and the ranks end."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=4 * BEAT_S)

    def _watch(self) -> None:
        try:
            while not self._closing.is_set():
                why = self._beat()
                if why and not self._closing.is_set():
                    logger.error("the target is lost: %s", why)
                    self._lost(why)
                    return
        finally:
            for peer in self._peers:
                peer.socket.close()
            self._listener.close()
            self._selector.close()

    def _beat(self) -> str:
        """Hear everyone, tell everyone; why the target is lost, "" while it is not."""
        for key, _ in self._selector.select(BEAT_S):
            if key.fileobj is self._listener:
                self._welcome()
            elif not self._hear(key.data):
                if key.data.rank > 0:
                    return f"rank {key.data.rank} has ended"
                self._dismiss(key.data)
        now_s = self._clock()
        for peer in list(self._peers):
            if now_s - peer.heard_s > self._silence_s:
                if peer.rank > 0:
                    return f"rank {peer.rank} was silent for {self._silence_s} s"
                self._dismiss(peer)
            elif not _say(peer.socket):
                return f"rank {peer.rank} has ended" if peer.rank > 0 else ""
        return ""

    def _welcome(self) -> None:
        try:
            found, _ = self._listener.accept()
        except BlockingIOError:  # gone again before it was taken
            return
        found.setblocking(False)
        peer = _Peer(found, self._clock())
        self._peers.append(peer)
        self._selector.register(found, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> bool:
        """False when the peer is gone or is none of ours."""
        try:
            heard = peer.socket.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not heard:
            return False
        peer.heard_s = self._clock()
        if peer.rank < 0:
            peer.hello += heard
            return self._recognise(peer)
        return True

    def _recognise(self, peer: _Peer) -> bool:
        if len(peer.hello) < _HELLO.size:
            return True
        token, rank = _HELLO.unpack(peer.hello[: _HELLO.size])
        if not hmac.compare_digest(token, self._token) or not 0 < rank < self._size:
            logger.warning("a stranger at the ranks' door was sent away")
            return False
        peer.rank = rank
        return True

    def _dismiss(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()


def hold_on(
    host: str, port: int, rank: int, token: bytes, lost: Callable[[str], object], silence_s: float = SILENCE_S
) -> threading.Thread:
    """A rank's end: connects, and calls `lost(why)` on a thread of its own once rank 0 is gone or silent."""
    line = socket.create_connection((host, port), timeout=silence_s)
    line.sendall(_HELLO.pack(token, rank))
    line.settimeout(BEAT_S)
    thread = threading.Thread(target=lambda: lost(_until_lost(line, silence_s)), name="lifeline", daemon=True)
    thread.start()
    return thread


def end_process(why: str) -> NoReturn:
    """At once: whatever the process computes is of no use to anyone, and may never return."""
    logger.error("this process ends: %s", why)
    os._exit(1)


def _until_lost(line: socket.socket, silence_s: float) -> str:
    heard_s = time.monotonic()
    with line:
        while True:
            try:
                if not line.recv(4096):
                    return "rank 0 has ended"
                heard_s = time.monotonic()
                line.sendall(b".")
            except TimeoutError:  # no beat; asked only then, so that a pause of this process is not taken for its
                if time.monotonic() - heard_s > silence_s:
                    return f"rank 0 was silent for {silence_s} s"
            except OSError as error:
                return f"rank 0 has ended: {error}"


def _say(line: socket.socket) -> bool:
    try:
        line.send(b".")
    except BlockingIOError:
        return True  # it does not read; its silence will tell
    except OSError:
        return False
    return True
