"""Train a reward model: python scripts/train_rm.py --help, or torchrun --nproc_per_node N scripts/train_rm.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("rm")
