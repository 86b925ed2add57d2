"""Byte-level BPE: lossless on any text, the same every time, and read back as it was."""

import pytest
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, GPT2Config

from mars_hf.data import train_tokenizer

TEXTS = [
    "the cat sat on the mat. the cat ate the rat.\n" * 20,
    "a quick brown fox jumps over a lazy dog, a log and a frog!\n" * 20,
]

HARD = [
    "the cat",
    "  two  spaces , a comma ;\ttabs\r\nand ends \n\n",
    "naïve café Ünïcödé ß € 😀👩‍👩‍👧 日本語 עברית",
    "\x00\x01\x7f\ufeff\ufffd\ud7ff\U0010ffff",
    "e\u0301 is not é",
    "don't isn't 1,000.5 <|endoftext|> <|pad|> <s>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.mark.parametrize("text", HARD)
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_and_size(tokenizer):
    assert len(tokenizer) == 300
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 0, 0)
    assert tokenizer.pad_token_id == 1
    assert len(tokenizer("the cat")["input_ids"]) == 2, "the most frequent words are one token each"
    assert tokenizer("the cat")["input_ids"] == tokenizer("the cat", add_special_tokens=False)["input_ids"]


def test_training_is_deterministic_and_reads_any_iterable(tokenizer):
    again = train_tokenizer((text for text in TEXTS), 300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_the_smallest_vocabulary_is_bytes_and_special_tokens():
    smallest = train_tokenizer(["abab"], 258)
    assert len(smallest) == 258
    assert len(smallest("é")["input_ids"]) == 2


def test_save_and_load_give_identical_ids_also_beside_a_model(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300, model_max_length=64)
    tokenizer.save_pretrained(tmp_path)
    # AutoTokenizer looks at the model's type too, and GPT-2's tokenizer is built in another way.
    GPT2Config().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.model_max_length == 64
    assert loaded.pad_token_id == 1 and loaded.eos_token_id == 0
    for text in [*TEXTS, *HARD]:
        ids = tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def test_the_stock_collator_masks_padding_but_not_the_end_of_text(tokenizer):
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": [5, 0, 6]}, {"input_ids": [7]}])
    assert batch["labels"].tolist() == [[5, 0, 6], [7, -100, -100]]


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["abab"], 257, "vocab_size=257 is too small: .* need 258"),
        ("abab", 300, "texts is one string"),
        ([], 300, "texts hold no pair of letters"),
        (["a"], 300, "texts hold no pair of letters"),
    ],
)
def test_errors(texts, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, vocab_size)
