"""Opens a feature drafter from the directory of its checkpoint: the one call that an assembly needs.

Knows which proposer belongs to which architecture, and nothing else.
"""

from pathlib import Path

from drafter_service.feature_drafters.block_model import BlockModel
from drafter_service.feature_drafters.block_proposer import BlockProposer
from drafter_service.feature_drafters.chain_proposer import ChainProposer
from drafter_service.feature_drafters.description import Settings
from drafter_service.feature_drafters.drafter import FeatureDrafter
from drafter_service.feature_drafters.features import FeatureFed
from drafter_service.feature_drafters.loading import LoadedDrafter, load_drafter
from drafter_service.feature_drafters.proposals import Proposer


def proposer_of(loaded: LoadedDrafter, point_drafts: bool | None = None) -> Proposer:
    """point_drafts: propose the most likely tokens at any temperature; None leaves it to the kind of drafter."""
    if isinstance(loaded.model, BlockModel):
        return BlockProposer(loaded, point_drafts=point_drafts)
    return ChainProposer(loaded, point_drafts=bool(point_drafts))


def open_feature_drafter(
    model_dir: str | Path,
    target_dir: str | Path,
    *,
    num_pages: int,
    page_size: int = 16,
    dtype: str = "float32",
    device: str = "cpu",
    settings: Settings | None = None,
    point_drafts: bool | None = None,
) -> FeatureFed:
    """Raises UnusableCheckpoint. The verifier's half is loading.load_projection of the same directory and settings."""
    loaded = load_drafter(
        model_dir, target_dir, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device, settings=settings
    )
    return FeatureDrafter(proposer_of(loaded, point_drafts), loaded.projection.feature_id())
