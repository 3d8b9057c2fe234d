"""Every value that crosses a process boundary: frozen dataclasses of ints, strings and numpy arrays.

Owns the vocabulary of a round (docs/architecture.md, "One round"). Knows nothing of how messages travel.

Lengths. *Committed* tokens are prompt and output including the newest one, the *anchor*; `base_len` is their number.
The KV cache covers rows 0..base_len-2: the anchor has been chosen but not yet run. A verification of `depth` draft
tokens runs rows base_len-1 .. base_len-1+depth and keeps the first num_accepted+1 of them. Row r chooses the token at
position r+1, so the first choice of a round is at absolute position base_len.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 5

Tokens: TypeAlias = NDArray[np.int32]  # [n] token ids
Confidence: TypeAlias = NDArray[np.float32]  # [n] in [0, 1]
Counts: TypeAlias = NDArray[np.uint16]  # [n] count - 1
Logs: TypeAlias = NDArray[np.float32]  # [n] natural logarithms
Features: TypeAlias = NDArray[np.float32]  # [rows * width], row after row

Rule: TypeAlias = Literal["coupled", "ratio"]
Law: TypeAlias = Literal["point", "sparse"]
FinishReason: TypeAlias = Literal["stop", "length", "preempted", "error"]


def as_tokens(ids: object = ()) -> Tokens:
    """`ids` as the array type that messages carry: one-dimensional int32."""
    return np.asarray(ids, dtype=np.int32).reshape(-1)


class Epoch(NamedTuple):
    """Orders the lives of a session; compares as a tuple. Receivers ignore anything below their own."""

    incarnation: int  # set by the ingress, one higher at each change of router
    placement: int  # counted by the router, one higher at each change of verifier


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """All that the choice of a token depends on besides the logits.

    temperature 0 is greedy. top_k 0 and top_p 1 are off. `key` is the request's 64-bit random key (the seed, if one was
    given), `choice` the index among the n choices of one request. max_tokens counts output tokens from prompt_len.
    What follows `choice` is off by default; outrider_kernels.processors says what each does and in which order.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    rule: Rule = "coupled"
    key: int = 0
    choice: int = 0
    min_p: float = 0.0  # least probability of a token, relative to the best one's
    repetition_penalty: float = 1.0  # of tokens in prompt or output
    frequency_penalty: float = 0.0  # for each time in the output
    presence_penalty: float = 0.0  # of tokens in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added); ids are distinct
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    min_tokens: int = 0  # no stop token before so many output tokens
    logprobs: int | None = None  # report log-probabilities, with those of so many best tokens
    prompt_logprobs: int | None = None  # the same of the prompt's tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request says of speculation. An empty drafter means the router chooses; max_depth None leaves it free."""

    enabled: bool = True
    max_depth: int | None = None
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's raw log-probabilities (before temperature and processors) of n committed tokens, in order, and of
    the k best tokens at each of their places, best first."""

    chosen: Logs  # [n]
    top_ids: Tokens  # [n * k]
    top: Logs  # [n * k]

    def of(self, start: int, stop: int) -> "TokenLogprobs":
        """Those of the tokens start .. stop-1."""
        k = len(self.top_ids) // max(1, len(self.chosen))
        places = slice(start * k, stop * k)
        return TokenLogprobs(self.chosen[start:stop], self.top_ids[places], self.top[places])


# --- handshake ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """What a process says of itself before the first message. Empty strings and zeros mean "does not apply"."""

    role: Literal["ingress", "router", "drafter", "verifier"]
    replica_id: str
    protocol_version: int = PROTOCOL_VERSION
    model_id: str = ""
    vocab_size: int = 0
    vocab_hash: str = ""  # of the token table, not only its size; "" = works with any vocabulary
    dtype: str = ""
    tp_size: int = 1
    drafter_kind: str = ""  # "prompt_lookup", "draft_model", ...
    drafter_name: str = ""  # the name under which requests choose it
    capacity: int = 0  # sessions that this replica takes at once
    max_len: int = 0  # longest sequence it can hold, in tokens
    max_depth: int = 0  # longest block it drafts or verifies
    numerics: str = ""  # fingerprint of everything that can change a logit
    feature_ids: tuple[str, ...] = ()  # kinds of features that a verifier keeps, or that a drafter reads


# --- ingress <-> router ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """Ingress to router: open a session, or resume it after its router was lost (`tokens` holds the output so far)."""

    session_id: str
    incarnation: int
    tokens: Tokens  # [>= prompt_len]
    prompt_len: int
    sampling: SamplingParams
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(frozen=True, slots=True)
class RoundStats:
    """What one round did, for usage and metrics. A depth-0 round has drafted 0."""

    drafted: int  # draft tokens that were verified
    accepted: int
    round_ms: float  # from the previous commit to this one
    draft_ms: float  # waited for the drafter
    verify_ms: float  # waited for the verifier
    step_ms: float = 0.0  # the pass itself, as the verifier measured it


@dataclass(frozen=True, slots=True)
class Committed:
    """Router to ingress: the tokens that one round appended at `base_len`. The last one carries finish_reason."""

    session_id: str
    incarnation: int
    base_len: int
    token_ids: Tokens  # [n]; may be empty when finish_reason says so
    finish_reason: FinishReason | None = None
    stats: RoundStats | None = None
    error: str = ""
    logprobs: TokenLogprobs | None = None  # of token_ids, when the request asks for them
    prompt_logprobs: TokenLogprobs | None = None  # as in VerifyResult


# --- router <-> drafter ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Router to drafter: extend the session to base_len with new_tokens and draft `depth` tokens from there.

    new_tokens are the committed tokens base_len-len(new_tokens) .. base_len-1. A drafter whose session is shorter than
    their start answers Stale with what it has; one that has more rolls back. `sampling` comes with a session's first
    tokens and holds until the session is forgotten; a drafter that was never told answers Stale. `verifier` is the
    address at which a drafter that reads features gets this session's.
    """

    session_id: str
    epoch: Epoch
    block_id: int
    base_len: int
    prompt_len: int
    new_tokens: Tokens
    depth: int
    sampling: SamplingParams | None  # None = as it was sent before
    verifier: str = ""


@dataclass(frozen=True, slots=True)
class DraftSupport:
    """The distributions that the tokens of a block were drawn from (law "sparse"), one row per token.

    Row i is the ids [starts[i], starts[i + 1]) with probabilities (counts + 1) / 2^16, which sum to 1. The token was
    drawn from exactly these, not from what they were rounded from. cluster.protocol.sparse_law judges the content.
    """

    ids: Tokens  # [n]
    starts: Tokens  # [depth + 1]
    counts: Counts  # [n]

    def first(self, depth: int) -> "DraftSupport":
        """The rows of the first `depth` tokens."""
        end = int(self.starts[depth])
        return DraftSupport(self.ids[:end], self.starts[: depth + 1], self.counts[:end])


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Drafter to router: 0..depth proposed tokens. law "point": each token is a deterministic function of the past
    (or raced with the request's own noise under the coupled rule). law "sparse": drawn from `support`."""

    session_id: str
    epoch: Epoch
    block_id: int
    base_len: int
    token_ids: Tokens  # [<= depth]
    confidence: Confidence  # [same] or [0] when the drafter has none
    law: Law = "point"
    support: DraftSupport | None = None


# --- router <-> verifier -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Router to verifier: hold a session. Runs rows 0..len(tokens)-2 (chunked prefill) but chooses nothing: the first
    choice comes from the VerifyRequest that follows at base_len = len(tokens). Rows are shared with sessions of
    the same cache_salt only."""

    session_id: str
    epoch: Epoch
    tokens: Tokens
    prompt_len: int
    sampling: SamplingParams
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Router to verifier: judge a block (empty = depth 0) that extends base_len committed tokens."""

    session_id: str
    epoch: Epoch
    block_id: int
    base_len: int
    token_ids: Tokens  # [depth]; may be a prefix of what was drafted
    law: Law = "point"
    support: DraftSupport | None = None  # of these tokens


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Verifier to router. Committed are the first num_accepted draft tokens, then next_token unless it is -1
    (a stop token or max_tokens inside the accepted prefix leaves no room for one).

    finish_reason "preempted": nothing was chosen, the session is gone and must be opened again. "error": this session
    cannot go on; `error` says why. A verifier repeats the result for the same (epoch, base_len, block_id).
    """

    session_id: str
    epoch: Epoch
    block_id: int
    base_len: int
    num_accepted: int
    next_token: int
    finish_reason: FinishReason | None = None
    error: str = ""
    step_ms: float = 0.0  # duration of the pass that produced it
    step_rows: int = 0  # rows in that pass, all sessions together
    logprobs: TokenLogprobs | None = None  # of the committed tokens, when the request asks for them
    # Of the prompt's tokens 1..prompt_len-1, when the request asks for them and base_len is prompt_len.
    prompt_logprobs: TokenLogprobs | None = None


# --- drafter <-> verifier ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Drafter to verifier: send the features of this session's committed rows from `start` on, those that are there and
    each further one when it is committed, to the link that this comes on. Asked again, it sends again from `start`."""

    session_id: str
    epoch: Epoch
    feature_id: str
    start: int


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Verifier to drafter: the features of committed rows start .. start+n-1, in order and each once.

    Rows before `first` will never come: nothing was kept of them. No rows at all: those from `start` on are kept, and
    come only when they are asked for again.
    """

    session_id: str
    epoch: Epoch
    feature_id: str
    start: int
    width: int
    values: Features  # [n * width]
    first: int = 0

    @property
    def rows(self) -> NDArray[np.float32]:
        """[n, width]"""
        return self.values.reshape(-1, self.width)


# --- any to any --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Close:
    """Free the session. From the ingress to the router, kept_len is the number of tokens that count (a stop string may
    cut inside a commit); -1 when the client has gone and nothing more counts."""

    session_id: str
    epoch: Epoch
    kept_len: int


@dataclass(frozen=True, slots=True)
class Stale:
    """The answer to a message that does not extend what the receiver holds: it says what it holds (0 = no session)."""

    session_id: str
    block_id: int
    have_epoch: Epoch
    have_len: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to an OpenSession, Generate or DraftRequest that cannot be taken; nothing is held for it."""

    session_id: str
    epoch: Epoch
    code: Literal["overloaded", "invalid", "unavailable"]
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's state, pushed to the peers of its links at most every 100 ms and to the board every second."""

    replica_id: str
    sessions: int
    queued: int
    capacity: int
    free_kv_tokens: int
    utilisation: float  # share of the last second spent computing, 0..1
    step_ms_by_rows: tuple[tuple[int, float], ...] = ()  # median ms of a pass with about that many rows
    # Of a verifier, since its start: tokens whose rows it needed for new and returning sessions, those of them that its
    # prefix cache had, pages that were dropped from there for want of room, sessions that lost theirs for a while.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_evicted_pages: int = 0
    preemptions: int = 0


Message: TypeAlias = (
    Generate
    | Committed
    | DraftRequest
    | DraftBlock
    | OpenSession
    | VerifyRequest
    | VerifyResult
    | FeatureRequest
    | FeatureRows
    | Close
    | Stale
    | Refused
    | LoadReport
)
