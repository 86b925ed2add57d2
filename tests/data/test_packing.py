"""Blocks hold every token once, in order; the collator labels them; the bytes behind them are exact."""

import logging
import subprocess
import sys

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from mars_hf.data import causal_collator, count_bytes, pack, packing, train_tokenizer

EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    # A limit shorter than the documents, as a model's is.
    return train_tokenizer(["the cat sat on the mat, naïvely. " * 50], 290, model_max_length=8)


def documents(count: int) -> list[str]:
    return ["the cat sat " * (i % 7) + f"on €{i} naïve 😀" for i in range(count)]


def stream(texts: list[str], tokenizer) -> list[int]:
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"], EOS]
    return ids


def packed(texts: list[str], tokenizer, block_size: int, **arguments) -> list[list[int]]:
    blocks = pack(Dataset.from_dict({"text": texts}), tokenizer, block_size, **arguments)
    assert blocks.column_names == ["input_ids"]
    return [block.tolist() for block in blocks["input_ids"]]


def test_by_hand(tokenizer):
    a, b, c, d, e = (tokenizer(letter)["input_ids"][0] for letter in "abcde")
    # a b EOS | c EOS d | e EOS and three tokens make a block: the last two are dropped.
    assert packed(["ab", "c", "", "de"], tokenizer, 3) == [[a, b, EOS], [c, EOS, d]]
    assert packed(["ab", "c", "", "de"], tokenizer, 4) == [[a, b, EOS, c], [EOS, d, e, EOS]]


@pytest.mark.parametrize(("count", "block_size"), [(150, 7), (2500, 64), (2500, 20000)])
def test_only_the_very_end_is_dropped(tokenizer, count, block_size):
    # 150 documents are several batches of tokenising; 2,500 are several of cutting, each with less than one long block.
    texts = documents(count)
    expected = stream(texts, tokenizer)
    blocks = packed(texts, tokenizer, block_size)
    assert {len(block) for block in blocks} == {block_size}
    whole = len(expected) // block_size * block_size
    assert whole > 0
    assert [token for block in blocks for token in block] == expected[:whole]


def test_the_result_does_not_depend_on_processes_or_batches(tokenizer, monkeypatch):
    texts = documents(40)
    expected = packed(texts, tokenizer, 16)
    assert packed(texts, tokenizer, 16, num_proc=2) == expected
    monkeypatch.setattr(packing, "DOCUMENTS_PER_BATCH", 3)
    assert packed(texts, tokenizer, 16) == expected


def test_long_documents_make_no_warning(caplog):
    # A tokenizer of its own: each warns only once.
    tokenizer = train_tokenizer(["the cat"], 260, model_max_length=8)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        packed(["the cat " * 100], tokenizer, 16)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records


def test_a_special_token_in_a_document_is_plain_text(tokenizer):
    blocks = packed(["a<|endoftext|>b<|pad|>c" * 3], tokenizer, 2)
    ids = [token for block in blocks for token in block]
    assert EOS not in ids[:-1] and tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids).startswith("a<|endoftext|>b<|pad|>c")


def test_files_are_packed_once(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"text": "the cat {i}"}}\n' for i in range(50)))
    data = Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache"))

    def files():
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("cache-*.arrow")}

    first = pack(data, tokenizer, 8)
    written = files()
    assert len(written) == 2, "one file of documents, one of blocks"
    assert pack(data, tokenizer, 8)["input_ids"][:].tolist() == first["input_ids"][:].tolist()
    assert files() == written
    pack(data, tokenizer, 9)
    assert len(files()) == 3, "another block size reads the same tokenised documents"


def test_a_dataset_dict_is_packed_split_by_split(tokenizer):
    data = DatasetDict(
        train=Dataset.from_dict({"text": ["the cat"] * 9}), validation=Dataset.from_dict({"text": ["mat"] * 9})
    )
    blocks = pack(data, tokenizer, 4)
    assert list(blocks) == ["train", "validation"]
    assert blocks["train"]["input_ids"][:].tolist() == pack(data["train"], tokenizer, 4)["input_ids"][:].tolist()


def test_the_collator_labels_every_token_like_the_stock_one(tokenizer):
    blocks = pack(Dataset.from_dict({"text": documents(20)}), tokenizer, 8)
    rows = [blocks[i] for i in range(4)]
    batch = causal_collator(rows)
    assert batch["input_ids"].shape == (4, 8) and batch["input_ids"].dtype == torch.int64
    assert_close(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()
    assert EOS in batch["labels"]
    stock = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert_close(batch["labels"], stock["labels"])
    assert_close(causal_collator(blocks.with_format(None).to_list()[:4])["labels"], batch["labels"])


def test_bytes_by_hand():
    tokenizer = train_tokenizer(["abab"], 258)
    # One token per byte: a, the 3 of €, EOS, b, c, EOS; in blocks of 4: a € | EOS b c EOS.
    blocks = pack(Dataset.from_dict({"text": ["a€", "bc"]}), tokenizer, 4)
    assert blocks["input_ids"][:].tolist()[1][0] == EOS
    assert count_bytes(blocks, tokenizer) == 3 + 2
    # In blocks of 3: a and 2 bytes of € | its last byte, EOS, b | (c, EOS dropped). A character may be cut.
    assert count_bytes(pack(Dataset.from_dict({"text": ["a€", "bc"]}), tokenizer, 3), tokenizer) == 2 + 1


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_bytes_of_all_blocks_are_those_of_the_text(tokenizer, block_size):
    texts = documents(60)
    total = len("".join(texts).encode())
    blocks = packed(texts, tokenizer, block_size)
    left_out = [block[0] for block in blocks] + stream(texts, tokenizer)[len(blocks) * block_size :]
    pieces = tokenizer.backend_tokenizer.id_to_token
    expected = total - sum(len(pieces(token)) for token in left_out if token != EOS)
    data = pack(Dataset.from_dict({"text": texts}), tokenizer, block_size)
    assert count_bytes(data, tokenizer) == expected


def test_bytes_of_an_added_token_are_those_of_its_text():
    tokenizer = train_tokenizer(["abab"], 258)
    tokenizer.add_tokens(["é!é"])
    blocks = pack(Dataset.from_dict({"text": ["aé!éb"]}), tokenizer, 4)
    assert count_bytes(blocks, tokenizer) == 5 + 1


def test_bytes_of_another_kind_of_tokenizer_are_those_of_the_decoded_text():
    words = Tokenizer(models.WordLevel({"<e>": 0, "the": 1, "café": 2, "cat": 3}, unk_token="<e>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="<e>")
    blocks = pack(Dataset.from_dict({"text": ["the café cat", "the"]}), tokenizer, 3)
    assert blocks["input_ids"][:].tolist() == [[1, 2, 3], [0, 1, 0]]
    assert count_bytes(blocks, tokenizer) == len("café cat".encode()) + len("the")


def test_errors(tokenizer):
    data = Dataset.from_dict({"text": ["ab"]})
    with pytest.raises(ValueError, match="validation has 3 tokens, less than one block of block_size=4"):
        pack(DatasetDict(train=Dataset.from_dict({"text": ["ab"] * 9}), validation=data), tokenizer, 4)
    with pytest.raises(ValueError, match="data has 0 tokens, less than one block"):
        pack(Dataset.from_dict({"text": [""]}), tokenizer, 4)
    with pytest.raises(ValueError, match=r"no column 'text' \(seen: body\)"):
        pack(data.rename_column("text", "body"), tokenizer, 4)
    with pytest.raises(ValueError, match="block_size=1 leaves nothing to predict"):
        pack(data, tokenizer, 1)
    with pytest.raises(ValueError, match="no eos_token"):
        pack(data, PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer), 4)
    with pytest.raises(ValueError, match=r"no column 'input_ids' \(seen: text\)"):
        count_bytes(data, tokenizer)


def test_importing_the_package_imports_neither_datasets_nor_transformers():
    code = "import sys, mars_hf.data; sys.exit(bool({'datasets', 'transformers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
