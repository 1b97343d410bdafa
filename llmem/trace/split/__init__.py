"""Ranks that hold a part: of tensors, of sequences, of experts. Each is really traced."""
