"""A small byte-level BPE tokenizer, trained on the corpus it will read."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, model_max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, the kind GPT-2 uses.

    A vocabulary of 50,257 tokens dominates the time of a small model on a CPU; one of a few thousand, trained on the
    corpus, does not. Encoding then decoding gives back any Unicode text unchanged, and no text is ever unknown. The
    same texts in the same order give the same tokenizer.

    `<|endoftext|>` (id 0) is bos, eos and unk. `<|pad|>` (id 1) is a token of its own, not eos: the stock
    `DataCollatorForLanguageModeling(mlm=False)` takes padding out of the labels, and would take every end of text with
    it. Packed blocks contain no padding.

    Args:
        texts: Documents, read once, in order; a column of a dataset (`dataset["text"]`) will do.
        vocab_size: Number of tokens, including the 256 bytes and the two special tokens. A short text can run out of
            pairs to merge before; `len(tokenizer)` is the size to build the model with.
        model_max_length: Longest input of the model, in tokens; None for no limit. Saved with the tokenizer.

    Returns:
        A fast tokenizer; `save_pretrained` then `AutoTokenizer.from_pretrained` gives identical ids.

    Raises:
        ValueError: `vocab_size` too small for the bytes and special tokens; `texts` a string, or without any text.
    """
    special = [END_OF_TEXT, PAD]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the bytes and the special tokens alone need {smallest}"
        )
    if isinstance(texts, str):
        raise ValueError("texts is one string, which would be read letter by letter: pass a list of documents")

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if vocab_size > smallest and bpe.get_vocab_size() == smallest:
        raise ValueError(
            f"texts hold no pair of letters to merge, so vocab_size={vocab_size} is out of reach: add text"
        )

    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=PAD,
        # The default would join " ." to "." on decoding: no longer the text that was encoded.
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
