"""The weights have one hash on any ranks, and another one as soon as a safeguard is left out."""

from __future__ import annotations

from pathlib import Path

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "exact_program.py"


def hashes(*arguments: str, world_size: int) -> dict[str, str]:
    output = run_spmd(PROGRAM, *arguments, world_size=world_size, timeout_s=120)
    cases = [line.split() for line in output.splitlines() if "CASE" in line]
    return {" ".join(words[-3:-1]): words[-1] for words in cases}


def test_one_hash_over_ranks_and_strategies_and_others_without_a_safeguard() -> None:
    one = hashes("single,fsdp", "broken", world_size=1)
    three = hashes("ddp,fsdp", world_size=3)
    names = ("single False", "single True", "fsdp False", "fsdp True")
    assert len({*(one[name] for name in names), *three.values()}) == 1
    assert len(three) == 4
    for safeguard in ("rounding", "order", "tile"):
        assert one[f"{safeguard} False"] != one[f"{safeguard} True"], safeguard
