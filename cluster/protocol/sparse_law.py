"""Whether a sparse draft distribution is one: what a drafter says its tokens were drawn from, checked before use.

Knows nothing of logits. A block that fails cannot be judged by the ratio rule and counts as empty: the law of the text
is the target's only if each token was drawn from exactly the distribution that came with it.
"""

import numpy as np

from cluster.protocol.messages import DraftSupport, Law, Tokens

SCALE = 1 << 16  # the counts of a row sum to it


def contradiction(token_ids: Tokens, law: Law, support: DraftSupport | None, vocab_size: int) -> str:
    """What is wrong with a block's law, with expected and got; "" when nothing is. vocab_size 0 = not known.

    The shapes of `support` fit the block (the codec has seen to it).
    """
    if (law == "sparse") != (support is not None):
        return f"law {law!r} came {'without' if support is None else 'with'} distributions"
    if support is None or len(token_ids) == 0:
        return ""
    ids, depth = support.ids, len(token_ids)
    rows = np.repeat(np.arange(depth), np.diff(support.starts))
    sums = np.bincount(rows, weights=support.counts.astype(np.int64) + 1, minlength=depth)
    if (sums != SCALE).any():
        row = int(np.argmax(sums != SCALE))
        return f"counts of row {row} sum to {int(sums[row])}, expected {SCALE}"
    if int(ids.min()) < 0 or (vocab_size and int(ids.max()) >= vocab_size):
        return f"support ids {int(ids.min())}..{int(ids.max())} are outside the vocabulary of {vocab_size}"
    if len(np.unique(rows * (np.int64(1) << 32) + ids)) != len(ids):
        return "an id occurs twice in one row"
    found = np.bincount(rows, weights=ids == token_ids[rows], minlength=depth)
    if (found == 0).any():
        row = int(np.argmax(found == 0))
        return f"draft token {int(token_ids[row])} of row {row} is not in its support"
    return ""
