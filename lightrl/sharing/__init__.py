"""Prompts that are computed once for all their samples (--share_prompts); nothing here is imported by a run without."""
