"""The parts that `--exact` adds to a run, so that no bit of its result depends on the ranks; see docs/exact.md."""
