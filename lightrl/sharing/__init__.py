"""Prompts that are computed once for all their samples (--share_prompts); other runs import nothing of it."""
