"""Log-probabilities as answers report them: of the target's raw logits, before temperature and processors.

Knows nothing of sessions. A row's values depend on that row alone.
"""

from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen [rows] float32, ids [rows, best] int64, values [rows, best] float32) of logits [rows, vocab] float32.

    chosen belongs to token_ids [rows] int64; the `best` most likely tokens come best first, all of them when there are
    fewer.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    values, ids = logits.topk(min(best, logits.shape[-1]), dim=-1)
    return (logits.gather(-1, token_ids[:, None]) - total).squeeze(-1), ids, values - total
