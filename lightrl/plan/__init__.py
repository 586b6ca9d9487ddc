"""Plans a run on paper: the bytes of each phase on a rank, batches and work, from nothing but a model's config.

models.py: the models of a run without weights. spread.py: what a strategy keeps of a model on a rank. activations.py
and meter.py: what a pass needs. engine.py: what the engine needs. peaks.py: everything, phase by phase. batches.py:
numbers of sequences and tokens. shared_prompts.py and trees.py: prompts that are computed once. fit.py: options that
make a run fit. text.py: the tables. command.py: the options of
`lightrl plan`. plan_program.py: it and --dry_run.
"""
