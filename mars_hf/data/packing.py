"""Documents to blocks of tokens, blocks to a batch, blocks to bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from mars_hf.data.bins import TokenBlocks

# Documents can be whole books, and a token takes over 100 bytes while it is between `tokenizers` and disk.
DOCUMENTS_PER_BATCH = 64
TOKENS = Features({"input_ids": List(Value("int32"))})

Data = TypeVar("Data", Dataset, DatasetDict)


def pack(data: Data, tokenizer: PreTrainedTokenizerBase, block_size: int, num_proc: int | None = None) -> Data:
    """Cuts documents into blocks of exactly `block_size` tokens.

    Every document is tokenised and followed by the eos token; all are joined in order and cut, so a block may hold
    several documents or a part of one. Only the tokens after the last whole block are dropped. Empty documents are
    skipped. A special token spelled out in a document is read as plain text: only `pack` ends a document. Both passes
    go through `datasets.map`: large corpora pass through the disk, and a second call reads the cache.

    Args:
        data: Documents in a column "text", as `load_text_corpus` returns them.
        tokenizer: Any tokenizer with an eos token.
        block_size: Tokens per block; the model predicts all but the first.
        num_proc: Processes that tokenise; None for one. The result does not depend on it.

    Returns:
        What was given, a Dataset or a DatasetDict, with the one column "input_ids", read as int64 tensors.
        Labels are not stored: `causal_collator` makes them.

    Raises:
        ValueError: No column "text", no eos token, `block_size` below 2, or a split with less than one block.
    """
    if block_size < 2:
        raise ValueError(f"block_size={block_size} leaves nothing to predict: use 2 tokens or more")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer has no eos_token to end a document with: set tokenizer.eos_token")
    if isinstance(data, DatasetDict):
        return DatasetDict({split: _pack(data[split], tokenizer, block_size, num_proc, split) for split in data})
    return _pack(data, tokenizer, block_size, num_proc, str(data.split or "data"))


def causal_collator(examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stacks packed blocks into a batch for a causal language model.

    The stock `DataCollatorForLanguageModeling(mlm=False)` gives the same batch with a tokenizer of
    `train_tokenizer`, at several times the cost; with GPT-2's it fails for want of a padding token, or, when padding is
    set to eos as often advised, leaves every eos out of the labels.

    Args:
        examples: Rows of a packed dataset, all of one block size.

    Returns:
        "input_ids" and "labels", int64 of shape (blocks, block_size), equal: the model shifts the labels by itself.
    """
    input_ids = torch.stack([torch.as_tensor(example["input_ids"], dtype=torch.long) for example in examples])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def count_bytes(blocks: Dataset | TokenBlocks, tokenizer: PreTrainedTokenizerBase) -> int:
    """Counts the UTF-8 bytes of the text that a model predicts in packed blocks.

    Bits per byte, comparable between tokenizers, is
    `eval_loss * blocks * (block_size - 1) / (count_bytes(blocks, tokenizer) * log(2))`.

    The first token of a block is only context, so its bytes do not count; a special token has none. The count is exact
    for byte-level BPE, where each letter of a token stands for a byte, also where a block cuts through a character.
    (A tokenizer that normalises text first is counted after it has done so.) For any other tokenizer the predicted part
    of each block is decoded and measured, which can lose a space at its start.

    Args:
        blocks: One split as `pack` returns it, or blocks of files of tokens.
        tokenizer: The tokenizer it was packed with.

    Returns:
        Number of bytes.

    Raises:
        ValueError: No column "input_ids".
    """
    if not isinstance(blocks, TokenBlocks) and "input_ids" not in blocks.column_names:
        raise ValueError(
            f"blocks has no column 'input_ids' (seen: {', '.join(blocks.column_names)}): pass what pack gives"
        )
    if isinstance(blocks, TokenBlocks):
        batches = (batch[:, 1:] for batch in blocks.batches())
    else:
        batches = (batch["input_ids"][:, 1:] for batch in blocks.with_format("numpy").iter(batch_size=1000))
    lengths = _byte_lengths(tokenizer)
    if lengths is not None:
        return sum(int(lengths[predicted].sum()) for predicted in batches)
    texts = (text for predicted in batches for text in tokenizer.batch_decode(predicted, skip_special_tokens=True))
    return sum(len(text.encode()) for text in texts)


def _pack(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, num_proc: int | None, split: str
) -> Dataset:
    if "text" not in data.column_names:
        raise ValueError(
            f"{split} has no column 'text' (seen: {', '.join(data.column_names)}): rename_column gives it one"
        )
    documents = data.map(
        tokenise,
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        fn_kwargs={"tokenizer": tokenizer},
        input_columns="text",
        remove_columns=data.column_names,
        features=TOKENS,
        num_proc=num_proc,
        desc=f"Tokenising {split}",
    )
    blocks = documents.with_format("arrow").map(
        _Blocks(block_size), batched=True, features=TOKENS, desc=f"Packing {split}"
    )
    if not len(blocks):
        tokens = sum(len(ids) for ids in documents["input_ids"])
        raise ValueError(
            f"{split} has {tokens} tokens, less than one block of block_size={block_size}: add text or lower it"
        )
    return blocks.with_format("torch")


def tokenise(texts: list[str | None], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Token ids of documents, each followed by the eos token; empty ones are left out.

    Args:
        texts: documents.
        tokenizer: any with an eos token.
    """
    texts = [text for text in texts if text]
    if not texts:
        return {"input_ids": []}
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        # Documents are longer than the model on purpose: no warning.
        verbose=False,
    )
    eos = tokenizer.eos_token_id
    return {"input_ids": [[*ids, eos] for ids in encoded["input_ids"]]}


class _Blocks:
    """Cuts batches of documents into blocks, and carries what is left of a batch into the next.

    Has to see the batches in order, hence in one process; the cost is that of copying the tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rest = np.empty(0, np.int32)

    def __call__(self, documents: pa.Table) -> pa.Table:
        tokens = documents["input_ids"].combine_chunks().flatten().to_numpy()
        tokens = np.concatenate([self.rest, tokens])
        whole = len(tokens) - len(tokens) % self.block_size
        self.rest = tokens[whole:]
        offsets = np.arange(0, whole + 1, self.block_size, dtype=np.int32)
        return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens[:whole])})


def _byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """UTF-8 bytes of every token id of a byte-level tokenizer; None for a tokenizer of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "decoder", None), ByteLevel):
        return None
    vocabulary = tokenizer.get_vocab()
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, index in vocabulary.items():
        lengths[index] = len(token)
    # Added tokens are spelled as plain text, not in the alphabet of bytes.
    for index, added in tokenizer.added_tokens_decoder.items():
        lengths[index] = 0 if added.special else len(added.content.encode())
    return lengths
