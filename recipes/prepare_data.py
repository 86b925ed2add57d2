"""Writes a text corpus as files of tokens, for pretrain_gpt2.py --dataset_path, nanoGPT and the authors' loaders.

    python recipes/prepare_data.py --dataset_name openwebtext --output_dir data/openwebtext
    python recipes/prepare_data.py --dataset_name fineweb-edu-10bt --format shards --output_dir data/fineweb
    python recipes/prepare_data.py --dataset_path my_books/ --tokenizer_name my_tokenizer/ --output_dir data/books

Killed, it goes on where it was when started again, and the files are the same to the byte.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mars_hf.hub import require_hub

# Dataset on the hub, its configuration, and GPT-2 tokens to come.
NAMED = {
    "openwebtext": ("Skylion007/openwebtext", None, 9e9),
    "fineweb-edu-10bt": ("HuggingFaceFW/fineweb-edu", "sample-10BT", 10e9),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample-100BT", 100e9),
}
# nanoGPT's share for OpenWebText.
NAMED_FRACTION = 0.0005


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="folder for the files, the manifest and the tokenizer")
    parser.add_argument("--dataset_name", help=f"{', '.join(NAMED)}, or anything datasets.load_dataset takes")
    parser.add_argument("--dataset_config", help="configuration of dataset_name")
    parser.add_argument("--dataset_path", help="local .txt, .md, .jsonl, .parquet or .csv: a file, a folder or a glob")
    parser.add_argument("--text_column", default="text", help="column that holds the documents")
    parser.add_argument(
        "--validation_fraction",
        type=float,
        help=f"share held out where no split is; default: {NAMED_FRACTION} of the corpora above, otherwise 0.1",
    )
    parser.add_argument("--validation_split", help="split to evaluate on")
    parser.add_argument("--tokenizer_name", default="gpt2", help="tokenizer on the hub or in a folder; default: gpt2")
    parser.add_argument(
        "--format",
        default="nanogpt",
        choices=["nanogpt", "shards"],
        help="nanogpt (default): train.bin and val.bin; shards: fineweb_train_000001.bin, ...",
    )
    parser.add_argument("--tokens_per_shard", type=int, default=100_000_000, help="tokens of a shard but the last")
    parser.add_argument("--num_proc", type=int, help="processes; default: the cores")
    parser.add_argument("--seed", type=int, default=42, help="seed of the choice of documents to hold out")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    name, config = args.dataset_name, args.dataset_config
    fraction, tokens = args.validation_fraction, 0.0
    if name in NAMED:
        name, known_config, tokens = NAMED[name]
        config = config or known_config
        fraction = NAMED_FRACTION if fraction is None else fraction
    if name is not None and not Path(name).is_dir():
        require_hub(f"dataset_name={name!r}", "--dataset_path FILES that you have")
    if not Path(args.tokenizer_name).is_dir():
        require_hub(f"tokenizer_name={args.tokenizer_name!r}", "--tokenizer_name FOLDER with a tokenizer.json")

    # Only now, so that what is wrong with the command line is said at once.
    from datasets import config as datasets_config

    from mars_hf.data import load_text_corpus
    from mars_hf.data.prepare import check_space, prepare
    from mars_hf.data.tokenizer import load_tokenizer

    if tokens:
        # Before hours of download. About 4.5 bytes of text a token; twice 2 bytes a token while files are joined.
        check_space(Path(args.output_dir), 4 * tokens, "for the tokens and the parts they are joined from")
        check_space(Path(datasets_config.HF_DATASETS_CACHE), 4.5 * tokens, "for the text (HF_HOME moves it)")
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
    if find_spec("tiktoken") is None:
        print("tiktoken is not installed: with it, tokenizers of GPT-2's kind are about ten times as fast", flush=True)
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


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
