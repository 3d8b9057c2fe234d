"""From the sharded logits of one pass to what each session's block comes to, moving as little as the choice needs.

Sessions whose choice is the best token or an unfiltered race are judged by the ranks' words, three numbers a row;
every other session's rows are gathered and judged as any logits (judge.py). Same outcomes either way.
"""

from collections.abc import Sequence

import numpy as np

from outrider_kernels.philox import signed_key
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE
from verifier_service.judge import NOT_FINITE, Outcome, judge
from verifier_service.session import Session
from verifier_service.sharded_logits import ShardedLogits
from verifier_service.step_plan import Races, Words


def judge_shards(logits: ShardedLogits, sessions: Sequence[Session]) -> list[Outcome]:
    """As `judge`: the rows with logits are those of the sessions' blocks, session after session."""
    ends = np.cumsum([len(session.draft) + 1 for session in sessions])
    rows = [np.arange(end - len(s.draft) - 1, end) for s, end in zip(sessions, ends.tolist(), strict=True)]
    raced = [i for i, session in enumerate(sessions) if _chooses_by_shards(session, logits.shards.vocab_size)]
    rest = [i for i in range(len(sessions)) if i not in set(raced)]
    found: dict[int, Outcome] = {}
    if raced:
        found |= zip(raced, _raced(logits, [sessions[i] for i in raced], [rows[i] for i in raced]), strict=True)
    if rest:
        whole = logits.gather(np.concatenate([rows[i] for i in rest]))
        found |= zip(rest, judge(whole, [sessions[i] for i in rest]), strict=True)
    return [found[i] for i in range(len(sessions))]


def _chooses_by_shards(session: Session, vocab_size: int) -> bool:
    """Whether each row's choice looks at nothing but the greatest logit or score."""
    sampling = session.sampling
    if session.rules is not None or sampling.logprobs is not None:
        return False
    if sampling.temperature < GREEDY_TEMPERATURE:
        return True
    filtered = 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0
    # Without a draft the ratio rule draws as the coupled one does.
    return not filtered and (sampling.rule != "ratio" or len(session.draft) == 0)


def _raced(logits: ShardedLogits, sessions: Sequence[Session], rows: Sequence[Words]) -> list[Outcome]:
    token_ids, sound = logits.choose(_races(sessions, rows))
    chosen, good = token_ids.numpy(), sound.numpy()
    ends = np.cumsum([len(r) for r in rows]).tolist()
    return [
        _accepted(session, chosen[end - len(r) : end], bool(good[end - len(r) : end].all()))
        for session, r, end in zip(sessions, rows, ends, strict=True)
    ]


def _races(sessions: Sequence[Session], rows: Sequence[Words]) -> Races:
    counts = [len(r) for r in rows]
    keys = np.array([signed_key(session.sampling.key) for session in sessions], np.int64)
    return Races(
        places=np.concatenate(rows),
        temperatures=np.repeat(np.array([_float32(s.sampling.temperature) for s in sessions], np.float32), counts),
        keys=np.repeat(keys, counts),
        positions=np.concatenate([session.length + np.arange(n) for session, n in zip(sessions, counts, strict=True)]),
        choices=np.repeat(np.array([session.sampling.choice for session in sessions], np.int64), counts),
    )


def _float32(temperature: float) -> float:
    return min(temperature, float(np.finfo(np.float32).max))


def _accepted(session: Session, chosen: Words, sound: bool) -> Outcome:
    """A draft stands up to the first token that the target would not have chosen itself."""
    if not sound:
        return Outcome(0, 0, NOT_FINITE)
    different = np.flatnonzero(chosen[:-1] != session.draft)
    end = int(different[0]) if len(different) else len(session.draft)
    return Outcome(end, int(chosen[end]))
