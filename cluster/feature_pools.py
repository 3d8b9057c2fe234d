"""Both halves of the drafters that read the target's hidden states, from one configuration: what verifiers project and
keep, and what drafters load.

Knows which directory belongs to whom; the halves agree because both are read from the same files and settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import DrafterConfig, EngineConfig
from cluster.model_store import resolve
from cluster.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from drafter_service.feature_drafters.description import Settings
    from drafter_service.feature_drafters.features import FeatureFed
    from outrider_kernels.feature_projection import FeatureProjection

_PAGE_SIZE = 16


def load_projections(
    drafters: Sequence[DrafterConfig], target: Path, engine: EngineConfig
) -> "list[FeatureProjection]":
    """What a verifier needs of the drafters' checkpoints. Raises InvalidRequest for those that do not fit."""
    from drafter_service.feature_drafters.loading import load_projection

    projections = []
    for drafter in drafters:
        if drafter.kind == "features":
            with _refused(drafter):
                directory = resolve(drafter.model_source)
                settings = _settings(drafter)
                projections.append(
                    load_projection(directory, target, dtype=engine.dtype, device=engine.device, settings=settings)
                )
    return projections


def open_drafter(drafter: DrafterConfig, target: Path) -> "FeatureFed":
    """Raises InvalidRequest."""
    from drafter_service.feature_drafters.from_checkpoint import open_feature_drafter

    with _refused(drafter):
        return open_feature_drafter(
            resolve(drafter.model_source),
            target,
            num_pages=drafter.kv_cache_tokens // _PAGE_SIZE,
            page_size=_PAGE_SIZE,
            settings=_settings(drafter),
        )


def _settings(drafter: DrafterConfig) -> "Settings":
    from drafter_service.feature_drafters.description import Settings

    return Settings(drafter.slot_layout, drafter.aux_layer_ids)


@contextmanager
def _refused(drafter: DrafterConfig) -> Iterator[None]:
    from drafter_service.feature_drafters.description import UnusableCheckpoint

    try:
        yield
    except UnusableCheckpoint as error:
        raise InvalidRequest(f"drafter {drafter.name!r}: {error}", field="drafters") from error
