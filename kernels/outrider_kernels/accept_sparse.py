"""The ratio rule over sparse drafts: target distributions and shipped supports in, accepted prefix and next token out.

Owns where block_verification.py's quantities come from and which randomness decides. Knows nothing of processors or
messages. This file is the contract and the torch implementation; it keeps float64 where probabilities are compared
and float32 where tokens race.
"""

from typing import Literal

import torch
from torch import Tensor

from cluster.protocol.sparse_law import SCALE
from outrider_kernels import block_verification as rules
from outrider_kernels.gumbel_race import ACCEPT, RACE, RECOVER, race_rows, uniform
from outrider_kernels.sparse_draft import SparseRows


def accept_sparse(
    log_target: Tensor,
    row_starts: Tensor,
    draft_ids: Tensor,
    supports: SparseRows,
    base_len: Tensor,
    key: Tensor,
    choice: Tensor,
    rule: Literal["block", "token"] = "block",
) -> tuple[Tensor, Tensor]:
    """(num_accepted [S] int64, next_token [S] int64) of S sessions whose drafts were drawn from `supports`.

    log_target [rows, vocab] float32: log-probabilities, -inf outside the target's support; row_starts, draft_ids as in
    accept.accept_blocks; supports has a row per row of log_target, empty on each session's last. base_len, key, choice:
    [S] int64. Uniform i of a session is of counter (base_len, i, choice, ACCEPT); the next token races at its absolute
    position on stream RECOVER after a rejection and RACE after the whole block.
    """
    depth = row_starts.diff() - 1
    index = torch.arange(int(depth.max()) if depth.numel() else 0, device=depth.device)
    within = index < depth[:, None]
    grid = torch.where(within, row_starts[:-1, None] + index, 0)  # [S, longest] rows
    probabilities = _Probabilities(log_target, draft_ids, supports)
    target = torch.where(within, probabilities.target_of_draft[grid], 0.0)
    draft = torch.where(within, probabilities.draft_of_draft[grid], 1.0)
    uniforms = uniform(base_len[:, None], index, key[:, None], choice[:, None], ACCEPT)
    if rule == "token":
        running = torch.ones_like(torch.nn.functional.pad(target, (1, 0)))
        accepted = rules.accepted_by_token(target, draft, uniforms, depth)
    else:
        running = rules.running_ratios(target, draft)
        residual = rules.residual_masses(running[:, :-1], probabilities.target[grid], probabilities.draft[grid])
        accepted = rules.accepted_by_block(rules.block_chances(running, residual, depth), uniforms)
    rows = row_starts[:-1] + accepted
    law = _next_law(log_target, rows, supports, probabilities, running.gather(-1, accepted[:, None]).squeeze(-1))
    streams = torch.where(accepted < depth, RECOVER, RACE)
    return accepted, race_rows(law, key, base_len + accepted, choice, streams)


class _Probabilities:
    """What target and draft say of the draft's support and of its tokens, float64."""

    def __init__(self, log_target: Tensor, draft_ids: Tensor, supports: SparseRows) -> None:
        filled = supports.counts > 0
        self.target = torch.where(filled, log_target.gather(-1, supports.ids).double().exp(), 0.0)  # [rows, m]
        self.draft = supports.counts.double() / SCALE  # [rows, m]
        drawn = filled & (supports.ids == draft_ids[:, None])
        self.target_of_draft = torch.where(drawn, self.target, 0.0).sum(dim=-1)  # [rows]
        self.draft_of_draft = torch.where(drawn, self.draft, 0.0).sum(dim=-1)


def _next_law(
    log_target: Tensor, rows: Tensor, supports: SparseRows, probabilities: _Probabilities, running: Tensor
) -> Tensor:
    """[S, vocab] float32 log weights of the next token, from the row after each accepted prefix."""
    law = log_target[rows]
    target, draft = probabilities.target[rows], probabilities.draft[rows]
    filled, ids = supports.counts[rows] > 0, supports.ids[rows]
    residual = rules.log_residual(target, draft, running).float()
    session, place = filled.nonzero(as_tuple=True)  # an empty place may repeat any id: it must write nothing
    law[session, ids[session, place]] = residual[session, place]
    # Rounding can leave nothing where target and draft are equal; such a rejection is itself a rounding error.
    nothing = (law.amax(dim=-1) == -torch.inf).nonzero().flatten()
    law[nothing] = log_target[rows[nothing]]
    return law
