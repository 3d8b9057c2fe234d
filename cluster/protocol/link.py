"""A Link over any pipe: the handshake first, then frames of messages. Knows nothing of what carries the bytes.

No message passes before both sides have proved that they know the secret. A malformed message harms only its session:
a malformed request is refused to its sender, a malformed answer arrives as that session's Refused.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from cluster.protocol import codec
from cluster.protocol.errors import HandshakeRefused, LinkClosed, ProtocolError
from cluster.protocol.handshake import NONCE_BYTES, check_compatible, check_proof, prove
from cluster.protocol.messages import Committed, DraftBlock, FeatureRows, Hello, Message, Refused, Stale, VerifyResult
from cluster.protocol.pipe import CLOSE_GRACE_S, Pipe
from cluster.protocol.transport import OnLink

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
HANDLER_GRACE_S = 1.0
_MAX_HANDSHAKE_BYTES = 16_384
WrapPipe: TypeAlias = Callable[[Pipe, Hello], Pipe]
_ANSWERS = (Committed, DraftBlock, VerifyResult, FeatureRows, Stale, Refused)


class FramedLink:
    """One end of a stream whose handshake is done."""

    def __init__(self, pipe: Pipe, peer: Hello) -> None:
        self._pipe = pipe
        self._peer = peer

    @property
    def peer(self) -> Hello:
        return self._peer

    async def send(self, messages: Sequence[Message]) -> None:
        if messages:
            await self._pipe.send(codec.encode(messages))

    async def receive(self) -> Sequence[Message]:
        while True:
            batch = await self._decode(await self._pipe.receive())
            if batch:
                return batch

    async def close(self) -> None:
        await self._pipe.close()

    async def _decode(self, frame: bytes) -> list[Message]:
        try:
            items = codec.decode(frame)
        except ProtocolError as error:
            # Unlike a malformed message, a damaged frame leaves nobody to answer: this peer cannot be trusted to
            # go on, and its sessions are kept by reconnecting.
            log.error("closing the link to %s %r: %s", self._peer.role, self._peer.replica_id, error)
            await self.close()
            raise LinkClosed(f"{self._peer.role} {self._peer.replica_id!r} sent a damaged frame") from error
        good: list[Message] = []
        for item in items:
            if not isinstance(item, codec.Malformed):
                good.append(item)
            elif (refusal := self._refusal(item)) is not None:
                if item.kind in _ANSWERS:
                    good.append(refusal)
                elif not self._pipe.offer(codec.encode([refusal])):
                    log.warning("no room to refuse it: the send queue is full")
        return good

    def _refusal(self, bad: codec.Malformed) -> Refused | None:
        kind = bad.kind.__name__ if bad.kind else "message"
        log.warning(
            "malformed %s of session %r from %s %r: %s",
            kind, bad.session_id, self._peer.role, self._peer.replica_id, bad.reason,
        )  # fmt: skip
        if not bad.session_id:
            return None
        return Refused(bad.session_id, bad.epoch, "invalid", f"malformed {kind}: {bad.reason}")


class AcceptedLinks:
    """The links that one listener has accepted, and the tasks that serve them."""

    def __init__(self, hello: Hello, secret: bytes, on_link: OnLink) -> None:
        self._hello = hello
        self._secret = secret
        self._on_link = on_link
        self._pipes: dict[asyncio.Task[None], Pipe] = {}

    def accept(self, pipe: Pipe, after_handshake: WrapPipe = lambda pipe, peer: pipe) -> None:
        """Serves a new pipe in a task of its own: handshake, `on_link`, close."""
        task = asyncio.get_running_loop().create_task(self._serve(pipe, after_handshake))
        self._pipes[task] = pipe
        task.add_done_callback(lambda task: self._pipes.pop(task))

    async def close(self) -> None:
        """Closes every link, gives the handlers a moment to notice, then cancels them."""
        pipes = {task: pipe for task, pipe in self._pipes.items() if task is not asyncio.current_task()}
        if not pipes:
            return
        await asyncio.gather(*(pipe.close() for pipe in pipes.values()))
        _, running = await asyncio.wait(pipes, timeout=HANDLER_GRACE_S)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=HANDLER_GRACE_S)

    async def _serve(self, pipe: Pipe, after_handshake: WrapPipe) -> None:
        try:
            peer = await admit(pipe, self._hello, self._secret)
            await self._on_link(FramedLink(after_handshake(pipe, peer), peer))
        except HandshakeRefused as error:
            log.warning("%s %r refused a link: %s", self._hello.role, self._hello.replica_id, error)
        except LinkClosed:
            pass  # the peer went away, which the handler need not have noticed
        except Exception:  # one link's handler must not take the listener's other links with it
            log.exception("%s %r: the handler of a link failed", self._hello.role, self._hello.replica_id)
        finally:
            await pipe.close()


# --- handshake -----------------------------------------------------------------------------------------------------
#
#     connector                                listener
#     Challenge(version, nonce)       ->
#                                     <-       Challenge
#     Introduction(hello, proof)      ->
#                                     <-       Introduction
#
# The listener may answer either with a Refusal, and says nothing of itself before the connector has proved itself.


class _Step(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class _Challenge(_Step, frozen=True):
    """The same in every protocol version, so that versions can be told apart."""

    version: int
    nonce: bytes


class _Introduction(_Step, frozen=True):
    hello: bytes  # msgpack of a Hello; as bytes, because the proofs cover it as it was sent
    proof: bytes


class _Refusal(_Step, frozen=True):
    reason: str


_STEP = msgspec.msgpack.Decoder(_Challenge | _Introduction | _Refusal)
S = TypeVar("S", bound=_Step)


async def greet(pipe: Pipe, hello: Hello, secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Hello:
    """The connector's side. Raises HandshakeRefused, or LinkClosed when the listener does not answer in time."""
    return await _bounded(pipe, _greet(pipe, hello, secret), timeout_s, grace_s=0.0)


async def admit(pipe: Pipe, hello: Hello, secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Hello:
    """The listener's side. Tells the connector why before it raises HandshakeRefused."""
    return await _bounded(pipe, _admit(pipe, hello, secret), timeout_s, grace_s=CLOSE_GRACE_S)


def refusal(reason: str) -> bytes:
    """The handshake frame that turns a connector away."""
    return msgspec.msgpack.encode(_Refusal(reason))


async def _greet(pipe: Pipe, hello: Hello, secret: bytes) -> Hello:
    nonces = [secrets.token_bytes(NONCE_BYTES)]
    await _send_step(pipe, _Challenge(hello.protocol_version, nonces[0]))
    nonces.append(_nonce(await _step(pipe, _Challenge), hello))
    mine = msgspec.msgpack.encode(hello)
    await _send_step(pipe, _Introduction(mine, prove(secret, "connector", *nonces, mine)))
    theirs = await _step(pipe, _Introduction)
    check_proof(secret, theirs.proof, "listener", *nonces, mine, theirs.hello)
    peer = _hello(theirs.hello)
    check_compatible(hello, peer)
    return peer


async def _admit(pipe: Pipe, hello: Hello, secret: bytes) -> Hello:
    try:
        nonces = [_nonce(await _step(pipe, _Challenge), hello), secrets.token_bytes(NONCE_BYTES)]
        await _send_step(pipe, _Challenge(hello.protocol_version, nonces[1]))
        theirs = await _step(pipe, _Introduction)
        check_proof(secret, theirs.proof, "connector", *nonces, theirs.hello)
        peer = _hello(theirs.hello)
        check_compatible(hello, peer)
    except HandshakeRefused as error:
        await _send_step(pipe, _Refusal(str(error)))
        raise
    mine = msgspec.msgpack.encode(hello)
    await _send_step(pipe, _Introduction(mine, prove(secret, "listener", *nonces, theirs.hello, mine)))
    return peer


async def _bounded(pipe: Pipe, handshake: Coroutine[Any, Any, Hello], timeout_s: float, grace_s: float) -> Hello:
    """Closes the pipe unless the handshake succeeds. `grace_s` is for a refusal to arrive."""
    peer = None
    try:
        async with asyncio.timeout(timeout_s):
            peer = await handshake
        return peer
    except TimeoutError as error:
        raise LinkClosed(f"the handshake did not end within {timeout_s:g} s") from error
    finally:
        if peer is None:
            await pipe.close(grace_s)


async def _send_step(pipe: Pipe, step: _Step) -> None:
    await pipe.send(msgspec.msgpack.encode(step))


async def _step(pipe: Pipe, expected: type[S]) -> S:
    frame = await pipe.receive()
    if len(frame) > _MAX_HANDSHAKE_BYTES:
        raise HandshakeRefused(f"expected at most {_MAX_HANDSHAKE_BYTES} bytes of handshake, got {len(frame)}")
    try:
        step = _STEP.decode(frame)
    except msgspec.MsgspecError as error:
        raise HandshakeRefused(f"unreadable handshake: {error}") from error
    if isinstance(step, _Refusal):
        raise HandshakeRefused(f"refused by the peer: {step.reason}")
    if not isinstance(step, expected):
        raise HandshakeRefused(f"expected {expected.__name__[1:]}, got {type(step).__name__[1:]}")
    return step


def _nonce(challenge: _Challenge, mine: Hello) -> bytes:
    if challenge.version != mine.protocol_version:
        raise HandshakeRefused(
            f"protocol versions differ: the {mine.role} {mine.replica_id!r} speaks {mine.protocol_version}, "
            f"its peer speaks {challenge.version}"
        )
    if len(challenge.nonce) != NONCE_BYTES:
        raise HandshakeRefused(f"expected a nonce of {NONCE_BYTES} bytes, got {len(challenge.nonce)}")
    return challenge.nonce


def _hello(raw: bytes) -> Hello:
    try:
        return msgspec.msgpack.decode(raw, type=Hello)
    except msgspec.MsgspecError as error:
        raise HandshakeRefused(f"unreadable hello: {error}") from error
