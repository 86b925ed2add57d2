"""Tokenizers of the corpus they will read: a small byte-level BPE, and one token a character."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_hf.hub import only_local

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CHARACTERS = "characters"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer on the hub or in a folder.

    Args:
        name: of it.

    Raises:
        ValueError: it cannot be loaded; in one line.
    """
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=only_local(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer_name={name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def corpus_tokenizer(name: str | None, texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer that `--tokenizer_name` means.

    Args:
        name: A tokenizer on the hub or in a folder, "characters", or None for one trained on the corpus.
        texts: Documents to train on, where `name` asks for it.
        vocab_size: Number of tokens to train.

    Raises:
        ValueError: As `load_tokenizer`, `train_tokenizer` and `character_tokenizer`.
    """
    if name is None:
        return train_tokenizer(texts, vocab_size)
    return character_tokenizer(texts) if name == CHARACTERS else load_tokenizer(name)


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token for each character of the corpus.

    The ids follow the order of the characters in Unicode, after `<|endoftext|>` (id 0), which is bos, eos and unk: a
    character that the corpus lacks is read as it, and lost. There is no padding token.

    Args:
        texts: Documents, read once.

    Returns:
        A fast tokenizer; `save_pretrained` then `AutoTokenizer.from_pretrained` gives identical ids.

    Raises:
        ValueError: `texts` a string, or without any text.
    """
    _check_documents(texts)
    characters = sorted(set().union(*texts))
    if not characters:
        raise ValueError("texts hold no character: add text")
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _fast(backend)


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
    _check_documents(texts)

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

    return _fast(bpe, pad_token=PAD, model_max_length=model_max_length)


def _check_documents(texts: Iterable[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("texts is one string, which would be read letter by letter: pass a list of documents")


def _fast(backend: Tokenizer, **arguments: str | int | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        # The default would join " ." to "." on decoding: no longer the text that was encoded.
        clean_up_tokenization_spaces=False,
        **arguments,
    )
