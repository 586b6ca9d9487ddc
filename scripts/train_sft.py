"""Train on responses: python scripts/train_sft.py --help, or torchrun --nproc_per_node N scripts/train_sft.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("sft")
