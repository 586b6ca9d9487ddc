"""Plans a run on paper: the bytes of each phase on a rank, the batches and the work, from a model's config alone.

models.py: the models of a run, without their weights. spread.py: what a strategy keeps of one on a rank. activations.py
and meter.py: what a pass needs. engine.py: what generates. peaks.py: all of it, phase by phase. batches.py: how many
tokens. shared_prompts.py and trees.py: prompts that are computed once. fit.py: the options that make a run fit.
text.py: the tables. plan_program.py: `lightrl plan` and --dry_run.
"""
