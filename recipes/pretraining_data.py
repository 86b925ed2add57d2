"""What pretrain_gpt2.py trains on: text, files of tokens, or a stream."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from mars_hf import MARSTrainingArguments
from mars_hf.data import Shuffled, TokenBlocks, bin_files, corpus_tokenizer, load_text_corpus, pack
from mars_hf.data.streaming import StreamedBlocks, StreamState, load_stream
from mars_hf.data.tokenizer import CHARACTERS, load_tokenizer
from mars_hf.hub import require_hub


@dataclass
class PretrainingData:
    """Blocks to train and to evaluate on, and what the model has to know of them."""

    train: Any
    validation: Any
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    described: str
    callbacks: list[TrainerCallback] = field(default_factory=list)

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase | int:
        """The tokenizer, or the number of tokens where there is none."""
        return self.vocab_size if self.tokenizer is None else self.tokenizer


def load_data(
    data_args: Any, args: MARSTrainingArguments, checkpoint: str | None, *, needs_tokenizer: bool
) -> PretrainingData:
    """Loads what the arguments ask for.

    Args:
        data_args: `DataArguments` of pretrain_gpt2.py.
        args: training arguments; for files of tokens `max_steps` and `train_sampling_strategy` are set.
        checkpoint: the checkpoint to resume from; None for a fresh run.
        needs_tokenizer: whether text will be sampled or scored.

    Raises:
        ValueError: arguments that contradict each other, or data that cannot be read.
    """
    if data_args.streaming:
        return from_stream(data_args, args, checkpoint)
    files = bin_files(data_args.dataset_path) if data_args.dataset_path else None
    if files and files["train"]:
        return from_bins(files, data_args, args, needs_tokenizer)
    return from_text(data_args, args)


def from_text(data_args: Any, args: MARSTrainingArguments) -> PretrainingData:
    """Documents, tokenised and packed before training."""
    names = ("dataset_name", "dataset_config", "dataset_path", "text_column", "validation_fraction", "validation_split")
    with args.main_process_first(desc="preparing the corpus"):
        corpus = load_text_corpus(**{name: getattr(data_args, name) for name in names}, seed=args.seed)
        tokenizer = corpus_tokenizer(data_args.tokenizer_name, corpus["train"]["text"], data_args.vocab_size)
        blocks = pack(corpus, tokenizer, data_args.block_size)
    tokens = len(blocks["train"]) * data_args.block_size
    return PretrainingData(
        blocks["train"], blocks["validation"], tokenizer, len(tokenizer), f"{tokens:,} training tokens"
    )


def from_bins(
    files: dict[str, list[Path]], data_args: Any, args: MARSTrainingArguments, needs_tokenizer: bool
) -> PretrainingData:
    """Files of tokens, mapped into memory, in an order that is computed."""
    if data_args.dataset_name is not None:
        raise ValueError(f"dataset_name={data_args.dataset_name!r} and files of tokens are both given: choose one")
    name = tokenizer_of(files, data_args)
    if name is None and needs_tokenizer:
        raise ValueError(
            "tokenizer_name=None: sampling and lm-eval need the tokenizer of the files, give it or "
            "--sample_tokens 0 --lm_eval_tasks none"
        )
    tokenizer = load_tokenizer(name) if name else None
    vocab_size = len(tokenizer) if tokenizer else data_args.vocab_size
    blocks = TokenBlocks(files["train"], data_args.block_size, vocab_size)
    validation = TokenBlocks(
        files["validation"], data_args.block_size, vocab_size, max_blocks=data_args.max_eval_blocks
    )
    if args.max_steps <= 0:
        args.max_steps = max(1, int(args.num_train_epochs * len(blocks)) // global_batch(args))
    seed = args.seed if args.data_seed is None else args.data_seed
    args.train_sampling_strategy = "sequential"
    train = Shuffled(blocks, args.max_steps * global_batch(args), seed)
    described = f"{blocks.tokens:,} training tokens in {len(files['train'])} file(s)"
    return PretrainingData(train, validation, tokenizer, vocab_size, described)


def tokenizer_of(files: dict[str, list[Path]], data_args: Any) -> str | None:
    """The name of the tokenizer: the one given, the folder beside the files, or None."""
    folders = (file.parent / "tokenizer" for file in files["train"][:1])
    return data_args.tokenizer_name or next((str(folder) for folder in folders if folder.is_dir()), None)


def planned_vocabulary(data_args: Any) -> int:
    """The size of the vocabulary, before text is read."""
    is_text = data_args.streaming or data_args.dataset_path is None
    files: dict[str, list[Path]] = {"train": []} if is_text else bin_files(data_args.dataset_path)
    name = tokenizer_of(files, data_args)
    return data_args.vocab_size if name in (None, CHARACTERS) else len(load_tokenizer(name))


def from_stream(data_args: Any, args: MARSTrainingArguments, checkpoint: str | None) -> PretrainingData:
    """Documents read and tokenised while training."""
    name = data_args.dataset_name
    if name is None or data_args.tokenizer_name is None or args.max_steps <= 0:
        raise ValueError(
            f"streaming=True with dataset_name={name!r}, tokenizer_name={data_args.tokenizer_name!r}, max_steps="
            f"{args.max_steps}: needs all three, dataset_name being one on the hub or a folder of text files"
        )
    if not Path(name).is_dir():
        require_hub(f"dataset_name={name!r}", "a folder of text files")
    tokenizer = load_tokenizer(data_args.tokenizer_name)
    documents, held_out = load_stream(
        name,
        data_args.dataset_config,
        data_args.text_column,
        data_args.validation_documents,
        data_args.validation_split,
    )
    train = StreamedBlocks(documents, tokenizer, data_args.block_size, global_batch(args), checkpoint)
    with args.main_process_first(desc="packing the held-out documents"):
        validation = pack(held_out, tokenizer, data_args.block_size)
    if data_args.max_eval_blocks is not None:
        validation = validation.select(range(min(len(validation), data_args.max_eval_blocks)))
    return PretrainingData(train, validation, tokenizer, len(tokenizer), "a stream of tokens", [StreamState(train)])


def global_batch(args: MARSTrainingArguments) -> int:
    """Blocks of an optimizer step, over all processes."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size
