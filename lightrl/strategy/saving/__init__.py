"""Training state on disk: what a checkpoint holds, and the format of its files."""
