"""The task and the model of a fresh installation: sums, and a small model that half knows them, without a download."""
