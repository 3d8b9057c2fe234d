"""Judges draft blocks against the target's logits: how many tokens are accepted and which one follows.

Owns the acceptance rules (docs/architecture.md, "Acceptance"): greedy, coupled, and the ratio test for point-mass
drafts. Knows nothing of sessions, caches or messages. What it commits follows the target distribution exactly,
whatever was drafted. This file is the contract and the torch implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.gumbel_race import ACCEPT, RACE, RECOVER, race_rows, uniform
from outrider_kernels.philox import signed_key
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE, target_distribution


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

    @staticmethod
    def of(
        sampling: Sequence[SamplingParams], base_lens: Sequence[int], device: torch.device | str = "cpu"
    ) -> "SamplingRows":
        """One row per session, in the given order."""

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        # A float64 temperature may be past float32's range; as infinity it would make NaN of a banned token.
        highest = torch.finfo(torch.float32).max
        return SamplingRows(
            temperature=column([min(params.temperature, highest) for params in sampling], torch.float32),
            top_k=column([params.top_k for params in sampling], torch.int64),
            top_p=column([params.top_p for params in sampling], torch.float32),
            key=column([signed_key(params.key) for params in sampling], torch.int64),
            choice=column([params.choice for params in sampling], torch.int64),
            base_len=column(list(base_lens), torch.int64),
            ratio=column([params.rule == "ratio" for params in sampling], torch.bool),
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
        )


def accept_blocks(
    logits: Tensor, row_starts: Tensor, draft_ids: Tensor, sampling: SamplingRows
) -> tuple[Tensor, Tensor]:
    """(num_accepted [S] int64, next_token [S] int64): the accepted prefix of each block and the token after it.

    logits [rows, vocab] float32, all sessions flattened; row_starts [S+1] int64 bounds each session's rows (at least
    one each); draft_ids [rows] int64 is the draft token that row judges, -1 on each session's last row, which has
    none. Row i of session s chooses the token at absolute position base_len[s] + i.
    """
    lengths = row_starts.diff()
    assert bool((lengths > 0).all()), "every session needs a row for the token after its block"
    session = torch.repeat_interleave(torch.arange(len(lengths), device=logits.device), lengths)
    index = torch.arange(len(draft_ids), device=logits.device) - row_starts[session]
    rows = sampling.take(session)
    tested = rows.ratio & (rows.temperature >= GREEDY_TEMPERATURE)

    chosen = torch.full_like(draft_ids, -1)
    raced = (~tested).nonzero().flatten()
    chosen[raced] = choose_tokens(_select(logits, raced), rows.take(raced), (rows.base_len + index)[raced])
    accepted = chosen == draft_ids
    tested_rows = tested.nonzero().flatten()
    log_target = _distribution(_select(logits, tested_rows), rows.take(tested_rows))
    accepted[tested_rows] = _passes_ratio(
        log_target, draft_ids[tested_rows], rows.take(tested_rows), index[tested_rows]
    )
    accepted &= draft_ids >= 0

    num_accepted = _leading(accepted, session, index, lengths)
    last = row_starts[:-1] + num_accepted
    next_token = chosen[last]
    to_draw = tested[last].nonzero().flatten()
    if to_draw.numel():
        place = torch.searchsorted(tested_rows, last[to_draw])
        next_token[to_draw] = _recover_or_bonus(
            log_target[place],
            draft_ids[last[to_draw]],
            sampling.take(to_draw),
            (sampling.base_len + num_accepted)[to_draw],
        )
    return num_accepted, next_token


def choose_tokens(logits: Tensor, sampling: SamplingRows, positions: Tensor) -> Tensor:
    """[rows] int64 choices of the target, one per row of logits [rows, vocab] float32: greedy or the coupled race.

    sampling has one entry per row and positions [rows] int64 is where each token goes (base_len is not read). Equal
    logits, parameters and position give the equal token; a drafter that calls this races with the verifier's noise.
    """
    sampled = (sampling.temperature >= GREEDY_TEMPERATURE).nonzero().flatten()
    if sampled.numel() == 0:
        return logits.argmax(dim=-1)  # the first maximum: ties go to the smaller id
    if sampled.numel() == len(logits):
        log_target = _distribution(logits, sampling)
        return race_rows(log_target, sampling.key, positions, sampling.choice, RACE)
    chosen = logits.argmax(dim=-1)
    chosen[sampled] = choose_tokens(logits[sampled], sampling.take(sampled), positions[sampled])
    return chosen


def _passes_ratio(log_target: Tensor, draft_ids: Tensor, rows: SamplingRows, index: Tensor) -> Tensor:
    """[rows] bool. A point mass on x is accepted with probability target(x): min(1, target(x) / 1)."""
    known = draft_ids.clamp(0, log_target.shape[-1] - 1)
    target = log_target.gather(-1, known[:, None]).squeeze(-1).double().exp()
    # Strict: with a uniform in [0, 1), <= could accept a token of target probability 0.
    passed = uniform(rows.base_len, index, rows.key, rows.choice, ACCEPT) < target
    return passed & (known == draft_ids)


def _recover_or_bonus(log_target: Tensor, rejected: Tensor, sampling: SamplingRows, positions: Tensor) -> Tensor:
    """[n] int64. After a rejection of x the law is the target's without x, else (rejected -1) the target's own.

    RECOVER and RACE are streams of their own: a draw that shared noise with the ratio test or with the draft would be
    biased.
    """
    has_rejected = (rejected >= 0) & (rejected < log_target.shape[-1])
    recovered = has_rejected.nonzero().flatten()
    log_target[recovered, rejected[recovered]] = -torch.inf
    next_token = torch.empty_like(rejected)
    for stream, part in ((RECOVER, recovered), (RACE, (~has_rejected).nonzero().flatten())):
        rows = sampling.take(part)
        next_token[part] = race_rows(log_target[part], rows.key, positions[part], rows.choice, stream)
    return next_token


def _leading(accepted: Tensor, session: Tensor, index: Tensor, lengths: Tensor) -> Tensor:
    """[S] int64 length of each session's leading run of accepted rows. The last row of a session never is."""
    first_miss = torch.where(accepted, torch.iinfo(torch.int64).max, index)
    return torch.full_like(lengths, torch.iinfo(torch.int64).max).scatter_reduce_(0, session, first_miss, "amin")


def _distribution(logits: Tensor, rows: SamplingRows) -> Tensor:
    return target_distribution(logits, rows.temperature, rows.top_k, rows.top_p)


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    """logits[rows] without a copy of everything when the rows are all of them."""
    return logits if len(rows) == len(logits) else logits[rows]
