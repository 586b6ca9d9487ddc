"""The training algorithms, each with its step, and the loop that runs the steps."""
