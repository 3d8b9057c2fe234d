"""The board: expiry, leases, and rebuilding from renewals."""

import asyncio

import pytest

from cluster.board import EXPIRY_S, LocalBoard, Registration
from cluster.membership import Membership
from cluster.protocol.errors import Unavailable
from cluster.protocol.messages import Hello


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def replica(replica_id: str, pool: str = "verifier") -> Registration:
    return Registration(replica_id, pool, f"local://{replica_id}", Hello(pool, replica_id))  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> LocalBoard:
    return LocalBoard(clock)


async def ids(board: LocalBoard, pool: str = "verifier") -> list[str]:
    return [member.replica_id for member in await board.members(pool)]  # type: ignore[arg-type]


async def test_members_are_listed_by_pool_in_a_stable_order(board: LocalBoard) -> None:
    for registration in (replica("v2"), replica("d1", "drafter"), replica("v1")):
        await board.renew(registration)
    assert await ids(board) == ["v1", "v2"]
    assert await ids(board, "drafter") == ["d1"]


async def test_a_replica_that_stops_renewing_expires(board: LocalBoard, clock: Clock) -> None:
    await board.renew(replica("v1"))
    clock.now += EXPIRY_S - 0.1
    assert await ids(board) == ["v1"]
    clock.now += 0.1
    assert await ids(board) == []


async def test_a_verifier_is_leased_to_one_router_at_a_time(board: LocalBoard, clock: Clock) -> None:
    assert await board.lease("v1", "r1")
    assert not await board.lease("v1", "r2")
    clock.now += EXPIRY_S - 1
    assert await board.lease("v1", "r1")  # renewed
    clock.now += EXPIRY_S - 1
    assert not await board.lease("v1", "r2")
    clock.now += 1
    assert await board.lease("v1", "r2")  # r1 stopped renewing
    assert not await board.lease("v1", "r1")


async def test_only_the_holder_can_release_a_lease(board: LocalBoard) -> None:
    await board.lease("v1", "r1")
    await board.release("v1", "r2")
    assert not await board.lease("v1", "r2")
    await board.release("v1", "r1")
    assert await board.lease("v1", "r2")


async def test_a_router_that_leaves_frees_its_leases(board: LocalBoard) -> None:
    await board.renew(replica("r1", "router"))
    await board.lease("v1", "r1")
    await board.leave("r1")
    assert await board.lease("v1", "r2")


class DeadBoard(LocalBoard):
    dead = True

    async def renew(self, registration: Registration) -> None:
        if self.dead:
            raise Unavailable("no board")
        await super().renew(registration)


async def test_a_member_outlives_a_board_that_does_not_answer(clock: Clock) -> None:
    board = DeadBoard(clock)
    membership = Membership(board, lambda: replica("v1"), every_s=0.001)
    await membership.join()
    assert await ids(board) == []
    board.dead = False
    while not await ids(board):  # bounded by the test's own time limit
        await asyncio.sleep(0.001)
    await membership.leave()
    assert await ids(board) == []
