"""Drafters that condition on the target's hidden states: DSpark, DFlash and EAGLE-3, from their public checkpoints."""
