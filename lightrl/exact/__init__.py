"""What `--exact` attaches to a run, so that no bit of its result depends on how it is spread; see docs/exact.md."""
