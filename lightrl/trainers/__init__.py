"""The training algorithms, each with its step, and the loop around a step."""
