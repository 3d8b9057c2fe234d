from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.replica_choice import VerifierLoad, choose_drafter, choose_verifier, rendezvous


def load(name: str, sessions: int = 0, capacity: int = 10, free: int = 1000, **more: object) -> VerifierLoad:
    return VerifierLoad(name, sessions, capacity, free, **more)


def test_a_session_goes_where_the_smallest_share_of_capacity_is_taken() -> None:
    assert choose_verifier([load("a", 5, 10), load("b", 6, 20)], 100) == "b"


def test_a_verifier_without_room_is_the_last_choice() -> None:
    assert choose_verifier([load("a", 0, free=50), load("b", 9)], 100) == "b"
    assert choose_verifier([load("a", 10), load("b", 9)], 100) == "b"
    assert choose_verifier([load("a", 10), load("b", 12)], 100) == "a"


def test_no_session_needs_more_than_the_context() -> None:
    assert choose_verifier([load("a", 1, free=200, max_len=128), load("b", 2)], 10_000) == "a"


def test_a_moved_session_keeps_its_numerics_and_avoids_the_verifier_that_failed_it() -> None:
    loads = [load("a", 0, numerics="x"), load("b", 5, numerics="y"), load("c", 7, numerics="y")]
    assert choose_verifier(loads, 10, numerics="y") == "b"
    assert choose_verifier(loads, 10, numerics="y", avoid="b") == "c"
    assert choose_verifier([load("b")], 10, avoid="b") == "b"


def test_without_verifiers_there_is_no_choice() -> None:
    assert choose_verifier([], 10) is None
    assert choose_drafter("s", {}) is None


def test_a_drafter_is_kept_while_its_load_allows() -> None:
    loads = dict.fromkeys("abcde", 0)
    assert choose_drafter("session", loads) == choose_drafter("session", loads) == rendezvous("session", loads)[0]


@given(st.integers(1, 9), st.integers(1, 300))
def test_no_drafter_gets_more_than_its_bounded_share(replicas: int, sessions: int) -> None:
    loads = {f"d{i}": 0 for i in range(replicas)}
    for i in range(sessions):
        chosen = choose_drafter(f"s{i}", loads)
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= 1.25 * sessions / replicas + 1


def test_a_replica_that_leaves_moves_only_its_own_sessions() -> None:
    replicas = [f"d{i}" for i in range(5)]
    before = {s: rendezvous(f"s{s}", replicas)[0] for s in range(500)}
    after = {s: rendezvous(f"s{s}", replicas[:-1])[0] for s in range(500)}
    assert all(after[s] == home for s, home in before.items() if home != "d4")
    assert min(Counter(before.values()).values()) > 50
