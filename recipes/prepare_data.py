"""Writes a text corpus as files of tokens, for pretrain_gpt2.py --dataset_path, nanoGPT and the authors' loaders.

    python recipes/prepare_data.py --dataset_name openwebtext --output_dir data/openwebtext
    python recipes/prepare_data.py --dataset_name fineweb-edu-10bt --format shards --output_dir data/fineweb
    python recipes/prepare_data.py --dataset_path my_books/ --tokenizer_name my_tokenizer/ --output_dir data/books

Killed, it goes on where it was when started again, and the files are the same to the byte.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import config as datasets_config
from transformers import AutoTokenizer

from mars_hf.data import load_text_corpus
from mars_hf.data.prepare import TOKENS_PER_SHARD, check_space, prepare
from mars_hf.evaluation.hub import require_hub
from mars_hf.training.config import parse_config

# Dataset on the hub, its configuration, and GPT-2 tokens to come.
NAMED = {
    "openwebtext": ("Skylion007/openwebtext", None, 9e9),
    "fineweb-edu-10bt": ("HuggingFaceFW/fineweb-edu", "sample-10BT", 10e9),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample-100BT", 100e9),
}
# nanoGPT's share for OpenWebText.
NAMED_FRACTION = 0.0005


@dataclass
class PrepareArguments:
    output_dir: str = field(metadata={"help": "Folder for the files, the manifest and the tokenizer."})
    dataset_name: str | None = field(
        default=None, metadata={"help": f"{', '.join(NAMED)}, or anything datasets.load_dataset takes."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of dataset_name."})
    dataset_path: str | None = field(
        default=None, metadata={"help": "Local .txt, .md, .jsonl, .parquet or .csv: a file, a folder or a glob."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the documents."})
    validation_fraction: float | None = field(
        default=None,
        metadata={"help": f"Share held out where no split is. Default: {NAMED_FRACTION} by name, otherwise 0.1."},
    )
    validation_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    tokenizer_name: str = field(default="gpt2", metadata={"help": "Tokenizer on the hub or in a folder."})
    format: Literal["nanogpt", "shards"] = field(
        default="nanogpt", metadata={"help": "nanogpt: train.bin and val.bin. shards: fineweb_train_000001.bin, ..."}
    )
    tokens_per_shard: int = field(default=TOKENS_PER_SHARD, metadata={"help": "Tokens of a shard but the last."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes. Default: the cores."})
    seed: int = field(default=42, metadata={"help": "Seed of the choice of documents to hold out."})


def main() -> None:
    (args,) = parse_config([PrepareArguments])
    name, config = args.dataset_name, args.dataset_config
    fraction = args.validation_fraction
    if name in NAMED:
        name, known_config, tokens = NAMED[name]
        config = config or known_config
        fraction = NAMED_FRACTION if fraction is None else fraction
        # Before hours of download. About 4.5 bytes of text a token; twice 2 bytes a token while files are joined.
        check_space(Path(args.output_dir), 4 * tokens, "for the tokens and the parts they are joined from")
        check_space(Path(datasets_config.HF_DATASETS_CACHE), 4.5 * tokens, "for the text (HF_HOME moves it)")
    if name is not None and not Path(name).is_dir():
        require_hub(f"dataset_name={name!r}", "--dataset_path FILES that you have")
    tokenizer = load_tokenizer(args.tokenizer_name)
    choice: dict[str, Any] = {
        "dataset_name": name,
        "dataset_config": config,
        "dataset_path": args.dataset_path,
        "text_column": args.text_column,
        "validation_fraction": 0.1 if fraction is None else fraction,
        "validation_split": args.validation_split,
        "seed": args.seed,
    }
    manifest = prepare(
        load_text_corpus(**choice),
        tokenizer,
        args.output_dir,
        source=choice,
        format=args.format,
        num_proc=args.num_proc or len(os.sched_getaffinity(0)),
        tokens_per_shard=args.tokens_per_shard,
    )
    for split, counts in manifest["splits"].items():
        print(f"{split}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    print(f"{len(manifest['files'])} files and manifest.json in {args.output_dir}")


def load_tokenizer(name: str) -> Any:
    """The tokenizer, or one line on what to do."""
    if not Path(name).is_dir():
        require_hub(f"tokenizer_name={name!r}", "--tokenizer_name FOLDER with a tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer_name={name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
