"""Compares engines and transformers' own `generate` on 64 requests x 64 tokens: tokens/s, weight sync, memory.

python benchmarks/engines.py --engines native vllm hf --model mid
python benchmarks/engines.py --engines native hf sglang=.venv-sglang/bin/python

Each engine has its own process (name=PYTHON starts it with another interpreter) and all take turns, so that a busy
machine slows them equally. One thread each, float32, no end tokens, logprobs on (not for generate).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_REQUESTS = 64
PROMPT_LENGTH = 16
NUM_TOKENS = 64


def save_model(name: str, folder: str) -> None:
    """Saves one of decode.py's random models; their head sizes are supported by every engine on a CPU."""
    from decode import random_model

    model = random_model(name)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.bos_token_id, config.pad_token_id = 1, None, 0
    model.save_pretrained(folder)


def prompts() -> list[list[int]]:
    import torch

    drawn = torch.randint(3, 98, (NUM_REQUESTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    return drawn.tolist()


class Generate:
    """Runs transformers' generate on one static batch."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def generate(self) -> dict[str, float]:
        import torch

        ids = torch.tensor(prompts())
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
        )
        return {}

    def close(self) -> None:
        pass


class Engine:
    """Runs one of lightrl's engines: generation, then a weight sync with its proof, then sleep."""

    def __init__(self, name: str, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        from lightrl.config import StrategyOptions
        from lightrl.strategy.torch_native import SingleStrategy

        options = StrategyOptions(engine=name, canary_every=0, exact_batches=True)
        self.strategy = SingleStrategy(0, 1.0, 1, 1, options)
        self.strategy.setup_distributed()
        self.actor = self.strategy.prepare_model(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))
        before = resident_mb()
        self.strategy.setup_inference_engine(None, name, actor=self.actor)
        self.start_mb = resident_mb() - before

    def generate(self) -> dict[str, float]:
        from lightrl.engines.base import SamplingParams

        assert self.strategy.engine is not None
        params = [SamplingParams(max_new_tokens=NUM_TOKENS, seed=i, ignore_eos=True) for i in range(NUM_REQUESTS)]
        self.strategy.wakeup_inference_engine()
        started = time.perf_counter()
        found = self.strategy.engine.generate(prompts(), params)
        seconds = time.perf_counter() - started
        assert sum(len(item.output_token_ids) for item in found) == NUM_REQUESTS * NUM_TOKENS
        return {"seconds": seconds}

    def phases(self) -> dict[str, float]:
        """Returns the seconds of a sync, and the resident memory awake, asleep, and with the weights awake."""
        memory = {"awake": resident_mb()}
        self.strategy.maybe_sleep_inference_engine()
        memory["asleep"] = resident_mb()
        self.strategy.update_engine_weights(self.actor)
        memory["weights"] = resident_mb()
        assert self.strategy.serving.last_sync is not None
        return {"sync": self.strategy.serving.last_sync.seconds, "start": self.start_mb, **memory}

    def close(self) -> None:
        self.strategy.close()


def resident_mb() -> float:
    """Returns the resident memory of this process and its children."""
    total = 0.0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if status.parent.name == str(os.getpid()) or fields.get("PPid", "").strip() == str(os.getpid()):
            total += float(fields.get("VmRSS", "0 kB").split()[0]) / 1024
    return total


def work(name: str, folder: str) -> None:
    """Runs a worker that answers every line with a line of JSON."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints goes to stderr
    subject: Any = Generate(folder) if name == "hf" else Engine(name, folder)
    subject.generate()  # warm-up
    print(json.dumps({"ready": True}), file=answer, flush=True)
    for line in sys.stdin:
        if line.strip() == "generate":
            started = time.perf_counter()
            found = subject.generate()
            result = {"seconds": time.perf_counter() - started, **found}
        else:
            result = subject.phases() if isinstance(subject, Engine) else {}
        print(json.dumps(result), file=answer, flush=True)
    subject.close()


class Worker:
    def __init__(self, spec: str, folder: str) -> None:
        self.name, _, python = spec.partition("=")
        command = [python or sys.executable, __file__, "--worker", self.name, folder]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._read()

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early; its message stands above.")
        found: dict[str, float] = json.loads(line)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["native", "vllm", "hf"],
        help="native, vllm, sglang or hf, each with =PYTHON for another interpreter (default: native vllm hf)",
    )
    parser.add_argument(
        "--model",
        choices=["toy", "mid"],
        default="toy",
        help="random model: toy has 0.8 and mid 42 million parameters (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(args.model, folder)
        workers = [Worker(spec, folder) for spec in args.engines]
        seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for _ in range(args.rounds):
            for worker in workers:
                seconds[worker.name].append(worker.ask("generate")["seconds"])
        phases = {worker.name: worker.ask("phases") for worker in workers}
        for worker in workers:
            worker.process.communicate(timeout=120)
    print("| engine | tokens/s, median | of hf | sync s | MB to start it | MB awake | asleep | weights awake |")
    print("|---|---|---|---|---|---|---|---|")
    for name, taken in seconds.items():
        speed = NUM_REQUESTS * NUM_TOKENS / statistics.median(taken)
        ratio = statistics.median(h / t for h, t in zip(seconds["hf"], taken, strict=True)) if "hf" in seconds else 0.0
        found = phases[name]
        sync = f"{found['sync']:.3f}" if found else "-"
        memory = [f"{found[key]:.0f}" if found else "-" for key in ("start", "awake", "asleep", "weights")]
        print(f"| {name} | {speed:.0f} | {ratio:.2f} | {sync} | {' | '.join(memory)} |")


if __name__ == "__main__":
    main()
