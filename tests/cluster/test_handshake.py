"""Who is let in, and that nothing but knowing the secret helps."""

import asyncio
from dataclasses import replace

import pytest

from cluster.protocol.errors import HandshakeRefused, LinkClosed
from cluster.protocol.handshake import (
    check_compatible,
    check_proof,
    door_key,
    opens_door,
    prove,
    same_vocabulary,
    vocab_hash,
)
from cluster.protocol.link import admit, greet
from cluster.protocol.local import pipe_pair
from cluster.protocol.messages import PROTOCOL_VERSION, Hello
from cluster.protocol.pipe import Pipe

SECRET = b"a secret of both sides"
INGRESS = Hello("ingress", "ingress-0")
ROUTER = Hello("router", "router-0")
DRAFTER = Hello("drafter", "drafter-0", vocab_size=3, vocab_hash=vocab_hash(["a", "b", "c"]))
VERIFIER = Hello("verifier", "verifier-0", vocab_size=3, vocab_hash=vocab_hash(["a", "b", "c"]))


# --- compatibility -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [INGRESS, DRAFTER, VERIFIER])
def test_a_router_may_talk_to_every_other_role(other: Hello) -> None:
    check_compatible(ROUTER, other)
    check_compatible(other, ROUTER)


@pytest.mark.parametrize(
    ("one", "other"), [(ROUTER, ROUTER), (INGRESS, VERIFIER), (INGRESS, DRAFTER), (DRAFTER, VERIFIER)]
)
def test_no_other_two_roles_have_a_link(one: Hello, other: Hello) -> None:
    with pytest.raises(HandshakeRefused, match=f"{one.role} '{one.replica_id}', {other.role} '{other.replica_id}'"):
        check_compatible(one, other)


@pytest.mark.parametrize("kept", [("f1",), ("f0", "f1")])
def test_a_drafter_talks_to_a_verifier_that_keeps_its_features(kept: tuple[str, ...]) -> None:
    drafter, verifier = replace(DRAFTER, feature_ids=("f1",)), replace(VERIFIER, feature_ids=kept)
    check_compatible(drafter, verifier)
    check_compatible(verifier, drafter)


@pytest.mark.parametrize("kept", [(), ("f0", "f2")])
def test_features_that_a_verifier_does_not_keep_are_refused_with_both_sides_kinds(kept: tuple[str, ...]) -> None:
    drafter, verifier = replace(DRAFTER, feature_ids=("f1",)), replace(VERIFIER, feature_ids=kept)
    told = rf"'drafter-0' reads \['f1'\].*'verifier-0' keeps \[{', '.join(map(repr, kept))}\]"
    with pytest.raises(HandshakeRefused, match=told):
        check_compatible(verifier, drafter)


def test_different_protocol_versions_are_refused_with_both() -> None:
    other = PROTOCOL_VERSION + 1
    told = rf"'router-0' speaks {PROTOCOL_VERSION}.*'verifier-0' speaks {other}"
    with pytest.raises(HandshakeRefused, match=told):
        check_compatible(ROUTER, replace(VERIFIER, protocol_version=other))


def test_a_drafter_with_the_targets_token_table_fits() -> None:
    same_vocabulary(DRAFTER, VERIFIER)


def test_a_drafter_of_another_vocabulary_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(HandshakeRefused, match=r"'drafter-0' has 2 tokens.*'verifier-0' has 3 tokens"):
        same_vocabulary(replace(DRAFTER, vocab_size=2, vocab_hash=vocab_hash(["a", "b"])), VERIFIER)


def test_two_swapped_token_ids_are_refused_although_the_sizes_agree() -> None:
    swapped = replace(DRAFTER, vocab_hash=vocab_hash(["b", "a", "c"]))
    with pytest.raises(HandshakeRefused, match=swapped.vocab_hash):
        same_vocabulary(swapped, VERIFIER)


def test_a_drafter_without_a_vocabulary_fits_every_target() -> None:
    same_vocabulary(replace(DRAFTER, vocab_size=0, vocab_hash=""), VERIFIER)


def test_the_vocabulary_hash_sees_where_tokens_end_and_reads_text_as_utf8() -> None:
    assert vocab_hash(["ab", "c"]) != vocab_hash(["a", "bc"])
    assert vocab_hash(["é"]) == vocab_hash(["é".encode()])


# --- proofs --------------------------------------------------------------------------------------------------------


def test_a_proof_holds_for_its_side_transcript_and_secret_only() -> None:
    proof = prove(SECRET, "connector", b"nonces", b"hello")
    check_proof(SECRET, proof, "connector", b"nonces", b"hello")
    for secret, side, transcript in [
        (b"a guess", "connector", (b"nonces", b"hello")),
        (SECRET, "listener", (b"nonces", b"hello")),  # reflected
        (SECRET, "connector", (b"others", b"hello")),  # replayed
        (SECRET, "connector", (b"nonces", b"hullo")),  # altered
        (SECRET, "connector", (b"nonceshello",)),
        (SECRET, "connector", (b"nonce", b"shello")),
    ]:
        with pytest.raises(HandshakeRefused, match="does not know"):
            check_proof(secret, proof, side, *transcript)  # type: ignore[arg-type]


def test_only_the_secrets_own_key_opens_the_door() -> None:
    assert opens_door(SECRET, door_key(SECRET))
    assert not any(opens_door(SECRET, key) for key in (b"", SECRET, door_key(b"a guess"), "text"))


# --- the exchange --------------------------------------------------------------------------------------------------


async def shake(
    near: Pipe, far: Pipe, secrets: tuple[bytes, bytes] = (SECRET, SECRET)
) -> tuple[Hello | BaseException, Hello | BaseException]:
    async with asyncio.timeout(20):
        near_saw, far_saw = await asyncio.gather(
            greet(near, ROUTER, secrets[0]), admit(far, VERIFIER, secrets[1]), return_exceptions=True
        )
        return near_saw, far_saw


async def test_two_that_know_the_secret_learn_who_the_other_is() -> None:
    assert await shake(*pipe_pair()) == (VERIFIER, ROUTER)


@pytest.mark.parametrize("secrets", [(b"a guess", SECRET), (SECRET, b"a guess")])
async def test_without_the_secret_both_sides_refuse_and_nobody_tells_it(secrets: tuple[bytes, bytes]) -> None:
    near, far = pipe_pair()
    refusals = await shake(near, far, secrets)
    assert all(isinstance(refusal, HandshakeRefused) for refusal in refusals)
    assert not any(word in str(refusals) for word in ("a guess", SECRET.decode(), "verifier-0"))
    for pipe in (near, far):
        with pytest.raises(LinkClosed):
            await pipe.send(b"a message")


class Eavesdropper:
    """A pipe that keeps what it hands on, and may change it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.heard: list[bytes] = []
        self.replace = (b"", b"")

    async def send(self, frame: bytes) -> None:
        await self._pipe.send(frame)

    def offer(self, frame: bytes) -> bool:
        return self._pipe.offer(frame)

    async def receive(self) -> bytes:
        self.heard.append(await self._pipe.receive())
        return self.heard[-1].replace(*self.replace) if self.replace[0] else self.heard[-1]

    async def close(self, grace_s: float = 1.0) -> None:
        await self._pipe.close(grace_s)


@pytest.mark.parametrize(("side", "hello"), [("near", b"verifier-0"), ("far", b"router-0")])
async def test_a_hello_altered_on_its_way_is_refused(side: str, hello: bytes) -> None:
    near, far = pipe_pair()
    middle = Eavesdropper(near if side == "near" else far)
    middle.replace = (hello, hello[:-1] + b"6")
    results = await shake(middle, far) if side == "near" else await shake(near, middle)
    assert isinstance(results[0 if side == "near" else 1], HandshakeRefused)


async def test_what_was_overheard_does_not_let_in_a_second_time() -> None:
    near, far = pipe_pair()
    ear = Eavesdropper(far)
    assert await shake(near, ear) == (VERIFIER, ROUTER)

    near, far = pipe_pair()
    for frame in ear.heard:
        await near.send(frame)
    with pytest.raises(HandshakeRefused, match="secret"):
        await admit(far, VERIFIER, SECRET)


async def test_the_secret_never_travels() -> None:
    near, far = pipe_pair()
    ears = Eavesdropper(near), Eavesdropper(far)
    await shake(*ears)
    assert len(ears[0].heard) == len(ears[1].heard) == 2
    assert SECRET not in b"".join(ears[0].heard + ears[1].heard)


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    for shaking in (greet(pipe_pair()[0], ROUTER, SECRET, 0.01), admit(pipe_pair()[0], VERIFIER, SECRET, 0.01)):
        with pytest.raises(LinkClosed, match=r"0\.01 s"):
            await shaking


SHORT_NONCE = b"\x93\xaa_Challenge" + bytes([PROTOCOL_VERSION]) + b"\xc4\x01n"


@pytest.mark.parametrize("frame", [b"", b"\xc0", b"\x91" * 10_000, b"x" * 20_000, SHORT_NONCE])
async def test_noise_in_place_of_a_handshake_is_refused(frame: bytes) -> None:
    near, far = pipe_pair()
    await near.send(frame)
    with pytest.raises(HandshakeRefused, match=r"expected|unreadable"):
        await admit(far, VERIFIER, SECRET)
