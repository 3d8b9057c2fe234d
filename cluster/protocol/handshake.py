"""Who may talk to whom, and the proof that both know the application's secret. Pure functions.

Each proof is an HMAC-SHA256 over the prover's side, both fresh nonces and the hellos as they were sent, so it can be
neither replayed, nor reflected, nor kept while a hello is altered. The secret never travels and is never printed.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

from cluster.protocol.errors import HandshakeRefused
from cluster.protocol.messages import Hello

NONCE_BYTES = 32
Side = Literal["connector", "listener"]

_MAY_TALK = [{"ingress", "router"}, {"router", "drafter"}, {"router", "verifier"}]


def check_compatible(mine: Hello, theirs: Hello) -> None:
    """Raises HandshakeRefused with both sides' values unless the two may talk."""
    if mine.protocol_version != theirs.protocol_version:
        raise HandshakeRefused(
            f"protocol versions differ: {_who(mine)} speaks {mine.protocol_version}, "
            f"{_who(theirs)} speaks {theirs.protocol_version}"
        )
    by_role = {mine.role: mine, theirs.role: theirs}
    if set(by_role) == {"drafter", "verifier"} and by_role["drafter"].feature_ids:
        same_features(by_role["drafter"], by_role["verifier"])
    elif {mine.role, theirs.role} not in _MAY_TALK:
        raise HandshakeRefused(f"a {mine.role} and a {theirs.role} have no link: {_who(mine)}, {_who(theirs)}")


def same_vocabulary(drafter: Hello, verifier: Hello) -> None:
    """Raises HandshakeRefused unless the drafter's token ids mean the verifier's tokens.

    A drafter without a vocabulary hash (prompt lookup) proposes only ids it has seen and fits every target.
    """
    if not drafter.vocab_hash:
        return
    if (drafter.vocab_size, drafter.vocab_hash) != (verifier.vocab_size, verifier.vocab_hash):
        raise HandshakeRefused(
            f"vocabularies differ: {_who(drafter)} has {drafter.vocab_size} tokens, hash {drafter.vocab_hash!r}; "
            f"{_who(verifier)} has {verifier.vocab_size} tokens, hash {verifier.vocab_hash!r}"
        )


def same_features(drafter: Hello, verifier: Hello) -> None:
    """Raises HandshakeRefused unless the verifier keeps every kind of features that the drafter reads."""
    if not set(drafter.feature_ids) <= set(verifier.feature_ids):
        raise HandshakeRefused(
            f"features differ: {_who(drafter)} reads {list(drafter.feature_ids)}, "
            f"{_who(verifier)} keeps {list(verifier.feature_ids)}"
        )


def vocab_hash(token_table: Iterable[str | bytes]) -> str:
    """SHA-256 over the tokens in the order of their ids, as hex; swapping two ids changes it."""
    digest = hashlib.sha256()
    for token in token_table:
        raw = token.encode() if isinstance(token, str) else token
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    return digest.hexdigest()


def prove(secret: bytes, side: Side, *transcript: bytes) -> bytes:
    """The proof of `side` over what was exchanged so far, in order: nonces, then hellos."""
    proof = hmac.new(secret, side.encode(), hashlib.sha256)
    for part in transcript:
        proof.update(len(part).to_bytes(4, "little"))
        proof.update(part)
    return proof.digest()


def check_proof(secret: bytes, proof: bytes, side: Side, *transcript: bytes) -> None:
    """Raises HandshakeRefused unless `proof` is that of a `side` which knows the secret."""
    if not hmac.compare_digest(prove(secret, side, *transcript), proof):
        raise HandshakeRefused(f"the {side} does not know this application's data-plane secret")


DOOR_KEY = "outrider-door-bin"  # gRPC metadata; "-bin" carries bytes


def door_key(secret: bytes) -> bytes:
    """What a connector shows first, so that strangers cost the listener nothing. No proof: it can be replayed."""
    return hmac.new(secret, b"door", hashlib.sha256).digest()


def opens_door(secret: bytes, key: bytes | str) -> bool:
    return isinstance(key, bytes) and hmac.compare_digest(door_key(secret), key)


def _who(hello: Hello) -> str:
    return f"{hello.role} {hello.replica_id!r}"
