"""Judges draft blocks against the target's logits: how many tokens are accepted and which one follows.

Owns the choice of rule per session (docs/architecture.md, "Acceptance"): greedy, coupled, the ratio test of point-mass
drafts; drafts with a distribution go to accept_sparse.py. Knows nothing of sessions, caches or messages. What it
commits follows the target distribution exactly, whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.best_tokens import best_token
from outrider_kernels.by_device import kernels_for
from outrider_kernels.gumbel_race import ACCEPT, RACE, RECOVER, Stream, uniform
from outrider_kernels.philox import signed_key
from outrider_kernels.short_law import is_filtered
from outrider_kernels.sparse_draft import DraftSupports, SparseRows
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the choices of S sessions depend on besides the logits; every field is a [S] tensor on one device."""

    temperature: Tensor  # float32; below GREEDY_TEMPERATURE = greedy
    top_k: Tensor  # int64; 0 = off
    top_p: Tensor  # float32; 1 = off
    key: Tensor  # int64 with the 64 bits of the request's key
    choice: Tensor  # int64
    base_len: Tensor  # int64; absolute position of the first choice
    ratio: Tensor  # bool; the ratio test instead of the coupled race
    min_p: Tensor | None = None  # float32, 0 = off; None = off in every row

    @staticmethod
    def of(
        sampling: Sequence[SamplingParams], base_lens: Sequence[int], device: torch.device | str = "cpu"
    ) -> "SamplingRows":
        """One row per session, in the given order."""

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # A float64 temperature may be past float32's range; as infinity it would make NaN of a banned token.
        highest = torch.finfo(torch.float32).max
        min_p = [params.min_p for params in sampling]
        return SamplingRows(
            temperature=column([min(params.temperature, highest) for params in sampling], torch.float32),
            top_k=column([params.top_k for params in sampling], torch.int64),
            top_p=column([params.top_p for params in sampling], torch.float32),
            key=column([signed_key(params.key) for params in sampling], torch.int64),
            choice=column([params.choice for params in sampling], torch.int64),
            base_len=column(list(base_lens), torch.int64),
            ratio=column([params.rule == "ratio" for params in sampling], torch.bool),
            min_p=column(min_p, torch.float32) if any(min_p) else None,
        )

    def take(self, sessions: Tensor) -> "SamplingRows":
        """The rows of the given sessions [n] int64, which may repeat."""
        return SamplingRows(
            self.temperature[sessions],
            self.top_k[sessions],
            self.top_p[sessions],
            self.key[sessions],
            self.choice[sessions],
            self.base_len[sessions],
            self.ratio[sessions],
            None if self.min_p is None else self.min_p[sessions],
        )


def accept_blocks(
    logits: Tensor,
    row_starts: Tensor,
    draft_ids: Tensor,
    sampling: SamplingRows,
    supports: DraftSupports | None = None,
) -> tuple[Tensor, Tensor]:
    """(num_accepted [S] int64, next_token [S] int64): the accepted prefix of each block and the token after it.

    logits [rows, vocab] float32 as processors.py leaves them, all sessions flattened; row_starts [S+1] int64 bounds
    each session's rows (at least one each); draft_ids [rows] int64 is the draft token that row judges, -1 on each
    session's last row, which has none. Row i of session s chooses the token at absolute position base_len[s] + i.
    supports are the distributions that the draft tokens were drawn from, of all the rows of a session's block or of
    none of them (point drafts); only the ratio rule looks at them, and judges the block by block verification.
    """
    assert bool((row_starts.diff() > 0).all()), "every session needs a row for the token after its block"
    if supports is None:
        return _accept_row_by_row(logits, row_starts, draft_ids, sampling)
    drawn = sampling.ratio & (sampling.temperature >= GREEDY_TEMPERATURE)
    drawn &= supports.lengths()[row_starts[:-1]] > 0
    if not bool(drawn.any()):
        return _accept_row_by_row(logits, row_starts, draft_ids, sampling)
    num_accepted = torch.zeros_like(row_starts[1:])
    next_token = torch.zeros_like(row_starts[1:])
    counts = row_starts.diff()
    for chosen in (drawn, ~drawn):
        sessions = chosen.nonzero().flatten()
        if sessions.numel() == 0:
            continue
        rows = chosen.repeat_interleave(counts).nonzero().flatten()
        starts = torch.nn.functional.pad(counts[sessions].cumsum(0), (1, 0))
        part = logits if len(rows) == len(logits) else logits[rows]
        if chosen is drawn:
            judged = _accept_drawn(part, starts, draft_ids[rows], sampling.take(sessions), supports.padded(rows))
        else:
            judged = _accept_row_by_row(part, starts, draft_ids[rows], sampling.take(sessions))
        num_accepted[sessions], next_token[sessions] = judged
    return num_accepted, next_token


def _accept_drawn(
    logits: Tensor, row_starts: Tensor, draft_ids: Tensor, sampling: SamplingRows, supports: SparseRows
) -> tuple[Tensor, Tensor]:
    """Block verification needs the target's distribution at every row."""
    sessions = torch.arange(len(sampling.key), device=logits.device).repeat_interleave(row_starts.diff())
    log_target = filtered_law(logits, sampling.take(sessions))
    judge = kernels_for(logits.device).accept_sparse
    return judge(log_target, row_starts, draft_ids, supports, sampling.base_len, sampling.key, sampling.choice)


def _accept_row_by_row(
    logits: Tensor, row_starts: Tensor, draft_ids: Tensor, sampling: SamplingRows
) -> tuple[Tensor, Tensor]:
    if _choosing_is_cheap(logits.shape[-1], sampling):
        return _accept_by_choice(logits, row_starts, draft_ids, sampling)
    num_accepted = torch.zeros_like(row_starts[1:])
    next_token = torch.zeros_like(row_starts[1:])
    # Row i of every session whose first i tokens were accepted: what follows a rejection is never computed, which on
    # a CPU saves most of the races (about 1 ms each for a 49k vocabulary).
    going = torch.arange(len(num_accepted), device=logits.device)
    index = 0
    while going.numel():
        rows = row_starts[going] + index
        accepted, following = _judge(logits[rows], draft_ids[rows], sampling.take(going), index)
        num_accepted[going] = index
        next_token[going] = following
        going = going[accepted]
        index += 1
    return num_accepted, next_token


def _choosing_is_cheap(vocab: int, sampling: SamplingRows) -> bool:
    """Whether choosing in every row at once, after a rejection too, costs less than going step by step: the best token
    of a row and a filtered race always (going step by step copies a row, which takes as long), the ratio test never."""
    greedy = sampling.temperature < GREEDY_TEMPERATURE
    filtered = is_filtered(sampling.top_k, sampling.top_p, sampling.min_p, vocab)
    return bool((greedy | (filtered & ~sampling.ratio)).all())


def _accept_by_choice(
    logits: Tensor, row_starts: Tensor, draft_ids: Tensor, sampling: SamplingRows
) -> tuple[Tensor, Tensor]:
    """Greedy and coupled: the target chooses in every row, and a block stands up to the first row that differs."""
    starts = row_starts[:-1]
    session = torch.arange(len(starts), device=logits.device).repeat_interleave(row_starts.diff())
    rows = torch.arange(len(logits), device=logits.device)
    chosen = choose_tokens(logits, sampling.take(session), sampling.base_len[session] + rows - starts[session])
    # A session's last row has no draft and always differs.
    different = (chosen != draft_ids).nonzero().flatten()
    ends = different[torch.searchsorted(different, starts)]
    return ends - starts, chosen[ends]


def _judge(logits: Tensor, draft_ids: Tensor, sampling: SamplingRows, index: int) -> tuple[Tensor, Tensor]:
    """(accepted, following) of one row per session: whether its draft token stands, and if not, what comes instead."""
    tested = sampling.ratio & (sampling.temperature >= GREEDY_TEMPERATURE)
    if not bool(tested.any()):
        return _judge_by_choice(logits, draft_ids, sampling, index)
    if bool(tested.all()):
        return _judge_by_ratio(logits, draft_ids, sampling, index)
    accepted, following = torch.zeros_like(tested), torch.zeros_like(draft_ids)
    for places in (tested.nonzero().flatten(), (~tested).nonzero().flatten()):
        accepted[places], following[places] = _judge(logits[places], draft_ids[places], sampling.take(places), index)
    return accepted, following


def _judge_by_choice(logits: Tensor, draft_ids: Tensor, sampling: SamplingRows, index: int) -> tuple[Tensor, Tensor]:
    """Greedy and coupled: the target chooses without looking at the draft, which stands if it is the same token."""
    chosen = choose_tokens(logits, sampling, sampling.base_len + index)
    return chosen == draft_ids, chosen


def _judge_by_ratio(logits: Tensor, draft_ids: Tensor, sampling: SamplingRows, index: int) -> tuple[Tensor, Tensor]:
    """Ratio test of a point mass on the draft token."""
    log_target = filtered_law(logits, sampling)
    accepted = _passes_ratio(log_target, draft_ids, sampling, torch.full_like(draft_ids, index))
    ended = (~accepted).nonzero().flatten()
    following = torch.zeros_like(draft_ids)
    following[ended] = _recover_or_bonus(
        log_target[ended], draft_ids[ended], sampling.take(ended), sampling.base_len[ended] + index
    )
    return accepted, following


def choose_tokens(logits: Tensor, sampling: SamplingRows, positions: Tensor) -> Tensor:
    """[rows] int64 choices of the target, one per row of logits [rows, vocab] float32: greedy or the coupled race.

    sampling has one entry per row and positions [rows] int64 is where each token goes (base_len is not read). Equal
    logits, parameters and position give the equal token; a drafter that calls this races with the verifier's noise.
    """
    sampled = (sampling.temperature >= GREEDY_TEMPERATURE).nonzero().flatten()
    if sampled.numel() == 0:
        return best_token(logits)  # ties go to the smaller id
    if sampled.numel() == len(logits):
        sample = kernels_for(logits.device).sample_rows
        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return sample(logits, *filters, sampling.key, positions, sampling.choice, RACE)
    chosen = best_token(logits)
    chosen[sampled] = choose_tokens(logits[sampled], sampling.take(sampled), positions[sampled])
    return chosen


def _passes_ratio(log_target: Tensor, draft_ids: Tensor, sampling: SamplingRows, index: Tensor) -> Tensor:
    """[n] bool. A point mass on x is accepted with probability target(x): min(1, target(x) / 1)."""
    known = draft_ids.clamp(0, log_target.shape[-1] - 1)
    target = log_target.gather(-1, known[:, None]).squeeze(-1).double().exp()
    # Strict: with a uniform in [0, 1), <= could accept a token of target probability 0.
    passed = uniform(sampling.base_len, index, sampling.key, sampling.choice, ACCEPT) < target
    return passed & (known == draft_ids)


def _recover_or_bonus(log_target: Tensor, rejected: Tensor, sampling: SamplingRows, positions: Tensor) -> Tensor:
    """[n] int64. After a rejection of x the law is the target's without x, else (rejected -1) the target's own.

    RECOVER and RACE are streams of their own: a draw that shared noise with the ratio test or with the draft would be
    biased.
    """
    has_rejected = (rejected >= 0) & (rejected < log_target.shape[-1])
    recovered = has_rejected.nonzero().flatten()
    log_target[recovered, rejected[recovered]] = -torch.inf
    streams = torch.where(has_rejected, RECOVER, RACE)
    return _race(log_target, sampling, positions, streams)


def _race(log_target: Tensor, sampling: SamplingRows, positions: Tensor, stream: Stream) -> Tensor:
    race_rows = kernels_for(log_target.device).race_rows
    return race_rows(log_target, sampling.key, positions, sampling.choice, stream)


def filtered_law(logits: Tensor, rows: SamplingRows) -> Tensor:
    """target_distribution of logits [rows, vocab] under each row's sampling."""
    filtered = kernels_for(logits.device).target_distribution
    return filtered(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
