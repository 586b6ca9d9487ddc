"""Plans a run on paper: the bytes of each phase on a rank, batches and work, from nothing but a model's config.

models.py: the models of a run without weights. spread.py: what a strategy keeps of a model on a rank. activations.py
and meter.py: what a pass needs. engine.py: what the engine needs. peaks.py: everything, phase by phase. batches.py:
numbers of sequences and tokens. shared_prompts.py and trees.py: prompts that are computed once. fit.py: options that
make a run fit. text.py: the tables. command.py: the command line of `lightrl plan`. named.py: checks
of a dry run. plan_program.py: the plan itself, and --dry_run.
"""
