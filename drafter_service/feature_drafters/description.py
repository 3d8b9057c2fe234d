"""What a drafter checkpoint is, in one set of words for every public layout.

Knows nothing of files, tensors or running. Values are normalised: layer ids say whose OUTPUT is captured, whatever the
file counts; a field never means two things depending on where it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

SlotLayout: TypeAlias = Literal["anchor_first", "one_plus_n"]
HeadKind: TypeAlias = Literal["none", "vanilla", "gated", "rnn"]
ConfidenceInput: TypeAlias = Literal["none", "hidden", "hidden_and_token"]


class UnusableCheckpoint(ValueError):
    """The checkpoint cannot serve this target, or says too little of itself; names both values, or the setting."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter has to fit."""

    vocab_size: int
    num_layers: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Answers to what some files leave open; None takes the file's word and refuses where it has none.

    slot_layout: whether the slot of the anchor predicts ("anchor_first", DeepSpec) or only masks do ("one_plus_n",
    z-lab). aux_layer_ids: whether eagle_aux_hidden_state_layer_ids count what enters a layer (SafeAILab, vLLM) or what
    leaves it (SGLang).
    """

    slot_layout: SlotLayout | None = None
    aux_layer_ids: Literal["inputs", "outputs"] | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer. Differences between families are values here, so that there is one layer class."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str  # a name of transformers.activations.ACT2FN
    attention_bias: bool
    attention_scale: float
    qk_norm: bool  # RMSNorm over each head of queries and keys, before RoPE
    sandwich: bool  # Gemma: norms after attention and MLP too, values normed, a scalar per layer
    values_are_keys: bool  # Gemma: no v_proj
    window: int | None  # rows of context before the block that are visible; None = all
    causal: bool  # whether the slots of a block see only earlier ones


@dataclass(frozen=True, slots=True)
class Description:
    """A drafter. `architecture` "block" drafts a block in one pass, "chain" one token a pass."""

    layout: str  # the file format: "deepspec", "z-lab", "safeailab", "specforge", "speculators"
    architecture: Literal["block", "chain"]
    layer_ids: tuple[int, ...]  # outputs of these target layers; -1 = the embedding's output
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[LayerShape, ...]
    rope: Mapping[str, Any]  # rope_type, rope_theta and what the type needs
    max_positions: int
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    # block
    block_size: int = 0  # slots
    slot_layout: SlotLayout = "anchor_first"
    mask_token_id: int = 0
    head: HeadKind = "none"
    head_rank: int = 0
    confidence: ConfidenceInput = "none"
    # chain
    norm_before_fusion: bool = False
    norm_before_residual: bool = False  # the residual is the normed hidden
    norm_output: bool = False  # what is fed back is the normed hidden

    @property
    def hidden_size(self) -> int:
        return self.layers[0].hidden_size

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft token."""
        return 1 if self.slot_layout == "one_plus_n" else 0

    @property
    def max_depth(self) -> int:
        """Draft tokens of a block; 0 = no limit of its own."""
        return self.block_size - self.first_slot if self.architecture == "block" else 0
