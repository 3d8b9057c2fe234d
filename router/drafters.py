"""The drafters that this router can reach: who drafts for a session, what was asked of it, what came back.

Owns drafter links, their health and every DraftRequest. Knows nothing of depth policies or verifiers' steps. Invariant:
a drafter can only change speed; whatever it sends or fails to send, the session's round goes on.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cluster.protocol.errors import HandshakeRefused
from cluster.protocol.handshake import same_features, same_vocabulary
from cluster.protocol.messages import (
    Close,
    DraftBlock,
    DraftRequest,
    Hello,
    LoadReport,
    Message,
    Refused,
    Stale,
    Tokens,
    as_tokens,
)
from cluster.protocol.sparse_law import contradiction
from router.drafter_health import DrafterHealth
from router.peer import Peer
from router.replica_choice import choose_drafter
from router.routed_session import AskedDraft, Block, RoutedSession
from router.stats import RouterStats

log = logging.getLogger(__name__)

MAX_RETRIES = 2  # of one request whose drafter was stale
REFUSAL_PAUSE_S = 0.5  # doubles with every refusal of a session, up to
LONGEST_REFUSAL_PAUSE_S = 30.0
REMEMBERED_REQUESTS = 4096


@dataclass(eq=False, slots=True)
class DrafterReplica:
    """One connected drafter. `asked` remembers when requests went out, and whether they brought only what is new."""

    peer: Peer
    health: DrafterHealth
    accepting: bool = True  # on the board
    sessions: set[str] = field(default_factory=set)
    asked: OrderedDict[tuple[str, int], tuple[float, bool]] = field(default_factory=OrderedDict)

    @property
    def hello(self) -> Hello:
        return self.peer.hello

    @property
    def replica_id(self) -> str:
        return self.peer.hello.replica_id


class Drafters:
    """`on_block(session)` is called whenever a round that waited for its block need not wait any longer."""

    def __init__(
        self,
        default_name: str,
        longest_wait_s: float,
        clock: Callable[[], float],
        stats: RouterStats,
        find: Callable[[str], RoutedSession | None],
        on_block: Callable[[RoutedSession], None],
    ) -> None:
        self._default_name = default_name
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._stats = stats
        self._find = find
        self._on_block = on_block
        self._replicas: dict[str, DrafterReplica] = {}

    # --- replicas --------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Sequence[DrafterReplica]:
        return list(self._replicas.values())

    def join(self, peer: Peer) -> DrafterReplica:
        replica = DrafterReplica(peer, DrafterHealth(self._longest_wait_s))
        self._replicas[replica.replica_id] = replica
        return replica

    def lose(self, replica: DrafterReplica) -> None:
        """The link is gone: rounds that waited go on, and their sessions choose another drafter."""
        if self._replicas.get(replica.replica_id) is replica:
            del self._replicas[replica.replica_id]
        for session_id in list(replica.sessions):
            session = self._find(session_id)
            if session is not None and session.drafter is replica:
                self._forget(session)
                self._give_up(session)
        replica.sessions.clear()

    # --- requests --------------------------------------------------------------------------------------------------

    def name_for(self, session: RoutedSession) -> str:
        """The pool that drafts for it."""
        return session.speculation.drafter or self._default_name

    def pick(self, session: RoutedSession, verifier: Hello) -> DrafterReplica | None:
        """Who could draft the next block of `session`; its present drafter if that one is fit. Asks nobody."""
        now_s = self._clock()
        if now_s < session.drafter_after_s:
            return None
        name = self.name_for(session)
        fit = [
            r
            for r in self._replicas.values()
            if r.peer.alive and r.hello.drafter_name == name and _fits(r.hello, verifier)
        ]
        trusted = [r for r in fit if r.health.trusted]
        chosen = session.drafter
        if chosen not in (trusted or fit):
            loads = {r.replica_id: len(r.sessions) for r in (trusted or fit) if r.accepting}
            chosen = self._replicas.get(choose_drafter(session.session_id, loads) or "")
        return chosen if chosen is not None and chosen.health.may_ask(now_s) else None

    def owes(self, session: RoutedSession) -> bool:
        """Whether an earlier request of the session may still be answered; until then it is not asked again."""
        return session.draft is not None and self._clock() - session.draft.asked_s < self._longest_wait_s

    def ask(self, session: RoutedSession, drafter: DrafterReplica, block_id: int, depth: int) -> None:
        """Send the DraftRequest of this round.

        The round waits for the block, unless the drafter is only being probed or has the whole text to read first.
        """
        now_s = self._clock()
        if session.drafter is not drafter:
            self.release(session)
            session.drafter = drafter
            drafter.sessions.add(session.session_id)
        awaited = drafter.health.trusted and session.drafter_len > 0
        drafter.health.asked(now_s)
        deadline_s = now_s + drafter.health.timeout_s
        session.draft = AskedDraft(block_id, len(session.state), depth, now_s, deadline_s)
        session.waits_for_draft = awaited
        self._send(session, drafter, session.draft)

    def time_out(self, session: RoutedSession) -> None:
        """The round goes on without the block it waited for."""
        self._stats.late_blocks += 1
        session.waits_for_draft = False
        session.reason = "late"
        if session.drafter is not None and session.draft is not None:
            session.drafter.health.timed_out(session.draft.asked_s, self._clock())

    def release(self, session: RoutedSession) -> None:
        """Free the session at its drafter."""
        if session.drafter is not None:
            session.drafter.sessions.discard(session.session_id)
            session.drafter.peer.send(Close(session.session_id, session.state.epoch, len(session.state)))
        self._forget(session)

    def _send(self, session: RoutedSession, drafter: DrafterReplica, draft: AskedDraft) -> None:
        state = session.state
        drafter.asked[(state.session_id, draft.block_id)] = (self._clock(), session.drafter_len > 0)
        if len(drafter.asked) > REMEMBERED_REQUESTS:
            drafter.asked.popitem(last=False)
        self._stats.draft_requests += 1
        new_tokens = state.tokens_from(session.drafter_len)[: draft.base_len - session.drafter_len]
        drafter.peer.send(
            DraftRequest(
                state.session_id,
                state.epoch,
                draft.block_id,
                draft.base_len,
                state.prompt_len,
                new_tokens,
                draft.depth,
                # Up to 12 kB with its biases: once per session, with its first tokens, which is where a drafter begins.
                state.sampling if session.drafter_len == 0 else None,
                session.verifier.address if session.verifier is not None and drafter.hello.feature_ids else "",
            )
        )

    # --- answers ---------------------------------------------------------------------------------------------------

    def handle(self, replica: DrafterReplica, message: Message) -> None:
        """One message of a drafter."""
        match message:
            case DraftBlock():
                self._block(replica, message)
            case Stale():
                self._stale(replica, message)
            case Refused():
                self._refused(replica, message)
            case LoadReport():
                pass  # its gauges reach the metrics by the board; the choice counts this router's own sessions
            case _:
                self._stats.bad_messages += 1

    def _block(self, replica: DrafterReplica, block: DraftBlock) -> None:
        now_s = self._clock()
        asked = replica.asked.pop((block.session_id, block.block_id), None)
        if asked is not None:
            asked_s, is_typical = asked
            replica.health.answered(now_s - asked_s, is_typical)
        session = self._asking(replica, block.session_id, block.block_id)
        if session is None or session.draft is None or block.base_len != session.draft.base_len:
            self._stats.ignored_blocks += 1
            return
        depth = session.draft.depth
        session.drafter_len, session.drafter_refusals = session.draft.base_len, 0
        session.draft = None
        if not session.waits_for_draft:
            self._stats.ignored_blocks += 1
            return
        session.block = self._usable(session, block, depth)
        session.waits_for_draft = False
        self._on_block(session)

    def _stale(self, replica: DrafterReplica, stale: Stale) -> None:
        session = self._asking(replica, stale.session_id, stale.block_id)
        if session is None or session.draft is None:
            self._stats.ignored_blocks += 1
            return
        self._stats.stale_drafts += 1
        session.drafter_len = stale.have_len if 0 <= stale.have_len < session.draft.base_len else 0
        if session.draft.retries < MAX_RETRIES and session.waits_for_draft:
            session.draft.retries += 1
            self._send(session, replica, session.draft)
        else:
            session.draft = None
            self._give_up(session)

    def _refused(self, replica: DrafterReplica, refused: Refused) -> None:
        session = self._find(refused.session_id)
        if session is None or session.drafter is not replica:
            self._stats.ignored_blocks += 1
            return
        log.info("drafter %r refused session %s: %s", replica.replica_id, refused.session_id, refused.message)
        self._stats.refused_drafts += 1
        pause_s = min(LONGEST_REFUSAL_PAUSE_S, REFUSAL_PAUSE_S * 2**session.drafter_refusals)
        session.drafter_refusals = min(16, session.drafter_refusals + 1)
        session.drafter_after_s = self._clock() + max(pause_s, min(refused.retry_after_s, LONGEST_REFUSAL_PAUSE_S))
        replica.sessions.discard(session.session_id)
        self._forget(session)
        self._give_up(session)

    def _asking(self, replica: DrafterReplica, session_id: str, block_id: int) -> RoutedSession | None:
        """The session whose outstanding request this answers."""
        session = self._find(session_id)
        if session is None or session.drafter is not replica or session.draft is None:
            return None
        return session if session.draft.block_id == block_id else None

    def _usable(self, session: RoutedSession, block: DraftBlock, depth: int) -> Block:
        """The block as far as it can be judged: empty when its law contradicts itself under the rule that needs it."""
        vocab_size = session.verifier.hello.vocab_size if session.verifier is not None else 0
        if session.state.sampling.rule != "ratio":
            return Block(self._clean(block.token_ids, depth, vocab_size))  # the race asks for no law
        why = contradiction(block.token_ids, block.law, block.support, vocab_size)
        if why:
            log.warning("session %s: unusable draft: %s", session.session_id, why)
            self._stats.contradictory_drafts += 1
            return Block(as_tokens())
        tokens = self._clean(block.token_ids, depth, vocab_size)
        support = block.support.first(len(tokens)) if block.support is not None else None
        return Block(tokens, block.law, support)

    def _clean(self, token_ids: Tokens, depth: int, vocab_size: int) -> Tokens:
        """The block up to what was asked and to its first id outside the vocabulary."""
        bad = (token_ids < 0) | (token_ids >= vocab_size if vocab_size else False)
        usable = min(int(bad.argmax()) if bad.any() else len(token_ids), depth)
        self._stats.truncated_drafts += usable < len(token_ids)
        return token_ids[:usable]

    def _forget(self, session: RoutedSession) -> None:
        session.drafter, session.drafter_len, session.draft = None, 0, None

    def _give_up(self, session: RoutedSession) -> None:
        """No block will come for this round."""
        if session.waits_for_draft:
            session.waits_for_draft = False
            session.reason = "no drafter"
            session.block = Block(as_tokens())
            self._on_block(session)


@lru_cache(maxsize=1024)
def _fits(drafter: Hello, verifier: Hello) -> bool:
    """Whether token ids and features mean the same to them; a mismatch is logged once."""
    try:
        same_vocabulary(drafter, verifier)
        same_features(drafter, verifier)
    except HandshakeRefused as error:
        log.error("never drafting with it: %s", error)
        return False
    return True
