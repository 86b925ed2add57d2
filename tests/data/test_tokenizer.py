"""Byte-level BPE: lossless on any text, the same every time, and read back as it was."""

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, GPT2Config

from mars_hf.data import character_tokenizer, corpus_tokenizer, count_bytes, pack, train_tokenizer

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


@pytest.fixture(scope="module")
def characters():
    return character_tokenizer(["to be,\nor 😀", "not é"])


def test_a_character_is_a_token_in_the_order_of_unicode(characters):
    # ids: <|endoftext|>, newline, space, comma, b, e, n, o, r, t, é, 😀
    assert len(characters) == 12
    assert characters("to be,\nor 😀")["input_ids"] == [9, 7, 2, 4, 5, 3, 1, 7, 8, 2, 11]
    assert (characters.bos_token_id, characters.eos_token_id, characters.unk_token_id) == (0, 0, 0)
    assert characters.pad_token_id is None


@pytest.mark.parametrize("text", ["  not  to\n\nbe ", "é😀,", "e\n", ""])
def test_known_characters_survive_the_round_trip(characters, text):
    assert characters.decode(characters(text)["input_ids"]) == text


def test_an_unknown_character_is_the_unknown_token(characters):
    assert characters("bXe\u0301")["input_ids"] == [4, 0, 5, 0]


def test_characters_are_saved_and_loaded_also_beside_a_model(characters, tmp_path):
    characters.save_pretrained(tmp_path)
    GPT2Config().save_pretrained(tmp_path)
    loaded = corpus_tokenizer(str(tmp_path), ["unread"], 300)
    text = "not to be,\n\n  or 😀"
    assert loaded(text)["input_ids"] == characters(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text and loaded.eos_token_id == 0


def test_packed_characters_and_their_bytes(characters):
    data = Dataset.from_dict({"text": ["to é\n", "be"]})
    blocks = pack(data, characters, 3)
    assert blocks["input_ids"][:].tolist() == [[9, 7, 2], [10, 1, 0], [4, 5, 0]]
    assert count_bytes(blocks, characters) == len("o ") + len("\n") + len("e")


def test_the_tokenizer_that_a_name_means(characters):
    texts = ["the cat sat on the mat"]
    assert len(corpus_tokenizer("characters", texts, 300)) == len(set(texts[0])) + 1
    trained = corpus_tokenizer(None, texts, 260)
    assert trained.backend_tokenizer.to_str() == train_tokenizer(texts, 260).backend_tokenizer.to_str()


@pytest.mark.parametrize(("texts", "message"), [("to be", "texts is one string"), ([""], "texts hold no character")])
def test_characters_need_documents(texts, message):
    with pytest.raises(ValueError, match=message):
        character_tokenizer(texts)
