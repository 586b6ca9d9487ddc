"""What a fresh installation trains with no download: a task of sums and a small model that half knows it."""
