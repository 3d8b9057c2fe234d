"""Fusion of captured layers by its definition, and a name that says whether two make the same features."""

from dataclasses import replace

import torch
from torch import Tensor

from outrider_kernels.feature_projection import FeatureProjection

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(6, 12, generator=GENERATOR).bfloat16().float()
NORM = torch.rand(6, generator=GENERATOR).bfloat16().float()
PLAIN = FeatureProjection((1, 4), WEIGHT, 1e-6)


def normed(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_norms_stand_before_and_after_the_product_where_there_are_any() -> None:
    rows, before = torch.randn(3, 12, generator=GENERATOR), torch.rand(12, generator=GENERATOR)
    both = replace(PLAIN, norm_before=before, norm_after=NORM)
    torch.testing.assert_close(PLAIN.project(rows), rows @ WEIGHT.T)
    torch.testing.assert_close(both.project(rows), normed(normed(rows, before) @ WEIGHT.T, NORM))
    assert PLAIN.project(rows[:0]).shape == (0, 6)
    assert PLAIN.width == 6


def test_a_feature_depends_on_its_own_row_only() -> None:
    rows = torch.randn(5, 12, generator=GENERATOR)
    torch.testing.assert_close(PLAIN.project(rows)[3:4], PLAIN.project(rows[3:4]))


def test_the_name_follows_what_changes_features_and_nothing_else() -> None:
    changed = [
        replace(PLAIN, layer_ids=(1, 5)),
        replace(PLAIN, eps=1e-5),
        replace(PLAIN, weight=WEIGHT + 1),
        replace(PLAIN, norm_after=NORM),
        replace(PLAIN, norm_before=torch.ones(12)),
    ]
    names = [projection.feature_id() for projection in (PLAIN, *changed)]
    assert len(set(names)) == len(names)
    assert replace(PLAIN, weight=WEIGHT.bfloat16()).feature_id() == PLAIN.feature_id()
