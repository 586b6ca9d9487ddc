"""Inference engines, the state machine around them, and the proof that weights reached them."""
