"""Blocks of a dataset that is read and tokenised while it is trained on."""

import json
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback

from mars_hf.data.corpus import read_errors, text_only
from mars_hf.data.packing import TOKENS, tokenise

# Packed together; what is left of a whole block at their end is dropped, so that nothing is carried along in memory and
# `datasets` can resume at any batch.
DOCUMENTS_PER_BATCH = 256
STATE = "stream.json"


def load_stream(
    dataset_name: str,
    dataset_config: str | None,
    text_column: str,
    validation_documents: int,
    validation_split: str | None = None,
) -> tuple[IterableDataset, Dataset]:
    """Opens a dataset on the hub or in a folder without downloading it.

    Args:
        dataset_name: what `datasets.load_dataset` takes.
        dataset_config: name of a configuration.
        text_column: column with the documents.
        validation_documents: how many documents to hold out: the first of `validation_split` or "validation", or,
            where there is none, the first of "train", which are then not trained on.
        validation_split: split to evaluate on.

    Returns:
        The documents to train on, in their order, and those to evaluate on, both with the one column "text".

    Raises:
        ValueError: it cannot be read, has no such split or column, or no document to hold out.
    """
    source = f"dataset_name={dataset_name!r}"
    with read_errors(source):
        splits = load_dataset(dataset_name, dataset_config, streaming=True)
        for wanted in ("train", validation_split or "train"):
            if wanted not in splits:
                raise ValueError(f"no split {wanted!r} (seen: {', '.join(splits)})")
        held_out = validation_split or ("validation" if "validation" in splits else "train")
        streams = {name: text_only(splits[name], text_column, source) for name in {"train", held_out}}
        validation = list(streams[held_out].take(validation_documents))
    if not validation:
        raise ValueError(f"validation_documents={validation_documents} of {source} is no document to evaluate on")
    train = streams["train"].skip(validation_documents) if held_out == "train" else streams["train"]
    return train, Dataset.from_list(validation)


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Endless blocks of a stream of documents, again from its start when it ends; for the Trainer.

    Documents are tokenised and each is followed by the eos token, as `pack` does; 256 documents at a time are joined
    and cut, so that less than one block of tokens is lost in each.

    Without a state the Trainer resumes by reading, tokenising and discarding all that was trained on. With a state
    (`StreamState` saves it) `datasets` goes on within the 256 documents at hand, and the blocks that the Trainer
    discards are stand-ins. Both give the same blocks. Data loader workers (`dataloader_num_workers`) keep no state, and
    none is used with another global batch.

    Args:
        documents: with the one column "text", as `load_stream` returns them.
        tokenizer: any with an eos token.
        block_size: tokens of a block.
        blocks_per_step: global batch: blocks that an optimizer step takes from all processes together.
        checkpoint: the checkpoint to resume from; None for a fresh run.

    Raises:
        ValueError: no eos token, or no block in the stream.
    """

    def __init__(
        self,
        documents: IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        blocks_per_step: int,
        checkpoint: str | Path | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer has no eos_token to end a document with: set tokenizer.eos_token")
        self.blocks_per_step = blocks_per_step
        blocks = documents.map(
            partial(_pack, tokenizer=tokenizer, block_size=block_size),
            batched=True,
            batch_size=DOCUMENTS_PER_BATCH,
            input_columns="text",
            remove_columns=["text"],
            features=TOKENS,
        )
        self._stand_in = {"input_ids": torch.zeros(block_size, dtype=torch.long)}
        self._start: dict[str, Any] = {"step": 0, "state": None}
        saved = None if checkpoint is None else Path(checkpoint) / STATE
        if saved is not None and saved.is_file():
            start = json.loads(saved.read_text())
            if start["blocks_per_step"] == blocks_per_step:
                self._start = start
        if self._start["state"] is None and next(iter(blocks), None) is None:
            raise ValueError(f"the stream has no {DOCUMENTS_PER_BATCH} documents with a block of {block_size} tokens")
        self.blocks = blocks.repeat(None)
        # The data loader is a batch or two ahead of the step that is saved.
        self.states: deque[dict[str, Any]] = deque(maxlen=8)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Blocks: "input_ids", int64 of shape (block_size,)."""
        step = self._start["step"]
        keeps_states = torch.utils.data.get_worker_info() is None
        if keeps_states and step:
            for _ in range(step * self.blocks_per_step):
                yield self._stand_in
            self.blocks.load_state_dict(self._start["state"])
        else:
            step = 0
        for i, block in enumerate(self.blocks, start=1):
            if keeps_states and i % self.blocks_per_step == 0:
                state = {"step": step + i // self.blocks_per_step, "blocks_per_step": self.blocks_per_step}
                self.states.append({**state, "state": self.blocks.state_dict()})
            yield {"input_ids": torch.as_tensor(block["input_ids"], dtype=torch.long)}


class StreamState(TrainerCallback):
    """Puts the place in the stream into every checkpoint, as stream.json.

    Args:
        stream: what the Trainer trains on.
    """

    def __init__(self, stream: StreamedBlocks) -> None:
        self.stream = stream

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the state of the saved step; the process that reads the stream for all has it."""
        for known in self.stream.states:
            if known["step"] == state.global_step and args.should_save:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                (folder / STATE).write_text(json.dumps(known))


def _pack(texts: list[str | None], tokenizer: PreTrainedTokenizerBase, block_size: int) -> dict[str, Any]:
    documents = tokenise(texts, tokenizer)["input_ids"]
    tokens = np.concatenate([np.empty(0, np.int32), *(np.array(ids, np.int32) for ids in documents)])
    return {"input_ids": list(tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size))}
