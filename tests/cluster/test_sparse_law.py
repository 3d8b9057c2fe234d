"""A block that contradicts its own law cannot be judged by the ratio rule."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.protocol.messages import DraftSupport, as_tokens
from cluster.protocol.sparse_law import SCALE, contradiction

TOKENS = as_tokens([4, 7])
SOUND = DraftSupport(
    as_tokens([4, 9, 1, 7, 4]), as_tokens([0, 2, 5]), np.array([SCALE - 2, 0, 99, SCALE - 111, 9], dtype=np.uint16)
)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint16)


def test_a_sound_block_has_none():
    assert contradiction(TOKENS, "sparse", SOUND, 10) == ""
    assert contradiction(TOKENS, "point", None, 10) == ""


@pytest.mark.parametrize(
    ("tokens", "support", "reason"),
    [
        ([4, 7], replace(SOUND, counts=counts(SCALE - 3, 0, 99, SCALE - 111, 9)), f"row 0 sum to {SCALE - 1}"),
        ([4, 7], replace(SOUND, counts=counts(SCALE - 2, 0, 99, SCALE - 111, 10)), f"row 1 sum to {SCALE + 1}"),
        ([4, 7], replace(SOUND, ids=as_tokens([4, 10, 1, 7, 4])), "outside the vocabulary of 10"),
        ([4, 7], replace(SOUND, ids=as_tokens([4, -1, 1, 7, 4])), "outside the vocabulary of 10"),
        ([4, 7], replace(SOUND, ids=as_tokens([4, 4, 1, 7, 2])), "twice in one row"),
        ([4, 9], SOUND, "draft token 9 of row 1 is not in its support"),
        ([1, 7], SOUND, "draft token 1 of row 0 is not in its support"),
        ([4, 7], replace(SOUND, starts=as_tokens([0, 5, 5])), "row 0 sum to"),
    ],
)
def test_a_contradictory_block_is_named(tokens, support, reason):
    assert reason in contradiction(as_tokens(tokens), "sparse", support, 10)


def test_a_law_must_fit_what_came_with_it():
    assert "without" in contradiction(TOKENS, "sparse", None, 10)
    assert "with distributions" in contradiction(TOKENS, "point", SOUND, 10)


def test_an_unknown_vocabulary_still_refuses_negative_ids():
    assert contradiction(TOKENS, "sparse", SOUND, 0) == ""
    assert "outside" in contradiction(TOKENS, "sparse", replace(SOUND, ids=as_tokens([4, -9, 1, 7, 4])), 0)


def test_the_same_id_in_two_rows_is_no_contradiction():
    assert contradiction(as_tokens([4, 4]), "sparse", SOUND, 10) == ""


def test_an_empty_block_claims_nothing():
    empty = DraftSupport(as_tokens(), as_tokens([0]), counts())
    assert contradiction(as_tokens(), "sparse", empty, 10) == ""
