"""Files of tokens: the formats to the byte, what is refused and where, blocks over files, the order of training."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from mars_hf.data import Shuffled, TokenBlocks, bin_files, causal_collator, read_tokens, write_tokens
from mars_hf.data.order import permuted

STREAM = np.arange(1000) % 97


def written(folder, *lengths, shard=False):
    """STREAM in files of these lengths."""
    files, start = [], 0
    for i, length in enumerate(lengths):
        files.append(folder / f"fineweb_train_{i:06d}.bin" if shard else folder / f"train{i}.bin")
        write_tokens(files[-1], STREAM[start : start + length], shard=shard)
        start += length
    return files


def test_the_formats_to_the_byte(tmp_path):
    write_tokens(tmp_path / "train.bin", [1, 258, 65535])
    assert (tmp_path / "train.bin").read_bytes() == b"\x01\x00\x02\x01\xff\xff"
    write_tokens(tmp_path / "fineweb_val_000000.bin", [1, 258, 65535], shard=True)
    header = np.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes()
    assert (tmp_path / "fineweb_val_000000.bin").read_bytes() == header + b"\x01\x00\x02\x01\xff\xff"
    for name in ("train.bin", "fineweb_val_000000.bin"):
        tokens = read_tokens(tmp_path / name)
        assert isinstance(tokens, np.memmap) and not tokens.flags.writeable, name
        assert tokens.tolist() == [1, 258, 65535], name
    with pytest.raises(ValueError, match=r"tokens=1\.\.65536 for '.*x.bin' do not fit uint16"):
        write_tokens(tmp_path / "x.bin", [1, 65536])


def shard(fields, tokens=b"\x01\x00" * 4):
    return np.array([*fields] + [0] * (256 - len(fields)), "<i4").tobytes() + tokens


BROKEN = {
    "empty": ("train.bin", b"", "no tokens after byte 0"),
    "odd": ("train.bin", b"\x01\x00\x02", "half a token at byte 2"),
    "uint32": ("train.bin", np.arange(50, dtype="<u4").tobytes(), "32 or 64 bits a token from byte 0"),
    "int64": ("train.bin", np.arange(50, dtype="<i8").tobytes(), "32 or 64 bits a token from byte 0"),
    "npy": ("train.bin", b"\x93NUMPY\x01\x00", "a NumPy file by byte 0"),
    "header": ("train.bin", shard([20240520, 1, 4])[:100], "truncated at byte 100, inside the header"),
    "no tokens": ("fineweb_train_1.bin", shard([20240520, 1, 0], b""), "no tokens after byte 1024"),
    "magic": ("fineweb_train_1.bin", shard([7, 1, 4]), "magic number 7 at byte 0"),
    "llama": ("fineweb_train_1.bin", shard([20240801, 7, 2]), "magic number 20240801 at byte 0 means uint32"),
    "version": ("fineweb_train_1.bin", shard([20240520, 2, 4]), "version 2 at byte 4"),
    "truncated": (
        "fineweb_train_1.bin",
        shard([20240520, 1, 4])[:-3],
        "ends at byte 1029, but 4 tokens .* 1032",
    ),
    "longer": ("fineweb_train_1.bin", shard([20240520, 1, 3]), "ends at byte 1032, but 3 tokens .* at byte 1030"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named_with_the_offset(tmp_path, case):
    name, content, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        TokenBlocks([tmp_path / name], 2, 100)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_a_small_vocabulary_is_not_taken_for_wide_integers(tmp_path):
    for tokens in ([0] * 512, [1, 2] * 256, [0, 1, 2, 9, 0, 1, 2, 9] * 64):
        write_tokens(tmp_path / "train.bin", tokens)
        assert read_tokens(tmp_path / "train.bin").tolist() == tokens


@pytest.mark.parametrize("kind", [False, True], ids=["nanogpt", "shard"])
def test_tokens_out_of_the_vocabulary(tmp_path, kind):
    """In the first block of a file at once; behind it when the block is read, and nothing else is read before."""
    header = 1024 if kind else 0
    ids = STREAM.copy()
    ids[[3, 700]] = 500, 501
    first, second = tmp_path / "train0.bin", tmp_path / "train1.bin"
    write_tokens(first, STREAM, shard=kind)
    write_tokens(second, ids, shard=kind)
    with pytest.raises(ValueError, match=rf"{second}: token 500 at byte {header + 6} is out of the vocabulary of 97"):
        TokenBlocks([first, second], 16, 97)
    blocks = TokenBlocks([first, second], 16, 501)
    assert blocks[62]["input_ids"].max() == 500  # the last 8 of the first file, the first 8 of the second
    with pytest.raises(ValueError, match=rf"{second}: token 501 at byte {header + 1400} is out .* of 501: give the"):
        blocks[1700 // 16]


@pytest.mark.parametrize("kind", [False, True], ids=["nanogpt", "shard"])
@pytest.mark.parametrize("lengths", [(1000,), (1, 2, 3, 400, 594), (500, 500), (7, 993)])
def test_several_files_are_one_stream(tmp_path, kind, lengths):
    blocks = TokenBlocks(written(tmp_path, *lengths, shard=kind), 64, 97)
    assert len(blocks) == 15 and blocks.tokens == 1000
    for blocks_ in (blocks, pickle.loads(pickle.dumps(blocks))):
        seen = torch.cat([blocks_[i]["input_ids"] for i in range(15)])
        assert seen.dtype == torch.int64
        assert seen.tolist() == STREAM[:960].tolist(), f"files of {lengths}"
    with pytest.raises(IndexError):
        blocks[15]
    short = TokenBlocks(written(tmp_path, *lengths, shard=kind), 64, 97, max_blocks=4)
    assert np.concatenate(list(short.batches(3))).ravel().tolist() == STREAM[:256].tolist()
    batch = causal_collator([blocks[0], blocks[1]])
    assert batch["input_ids"].shape == (2, 64) and torch.equal(batch["input_ids"], batch["labels"])


def test_tokens_are_not_copied(tmp_path):
    file = tmp_path / "train.bin"
    np.tile(STREAM, 20_000).astype("<u2").tofile(file)  # 40 MB
    tracemalloc.start()
    blocks = TokenBlocks([file], 1000, 97)
    pickled = pickle.dumps(blocks)
    order = Shuffled(blocks, 10**12, 0)
    order[10**12 - 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 and len(pickled) < 2000


def test_a_manifest_of_something_else_says_nothing_and_a_broken_one_is_named(tmp_path):
    write_tokens(tmp_path / "val.bin", [1] * 20)
    for text in ("[]", '{"files": [{"name": "val.bin"}]}', '{"files": {"val.bin": {"size": 3}}}'):
        (tmp_path / "manifest.json").write_text(text)
        assert len(TokenBlocks([tmp_path / "val.bin"], 4, 8)) == 5, text
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is no JSON \(.*\): remove it or write the files again"):
        TokenBlocks([tmp_path / "val.bin"], 4, 8)


@pytest.mark.parametrize("blocks", [0, -1])
def test_no_block_at_all_is_refused(tmp_path, blocks):
    write_tokens(tmp_path / "val.bin", [1] * 20)
    with pytest.raises(ValueError, match=f"max_blocks={blocks} leaves no block"):
        TokenBlocks([tmp_path / "val.bin"], 4, 8, max_blocks=blocks)


def test_less_than_a_block_and_a_truncated_file_of_the_manifest(tmp_path):
    (file,) = written(tmp_path, 10)
    with pytest.raises(ValueError, match="10 tokens, less than one block of block_size=11"):
        TokenBlocks([file], 11, 97)
    (tmp_path / "manifest.json").write_text('{"files": {"train0.bin": {"tokens": 11}}}')
    with pytest.raises(ValueError, match=r"train0.bin: 10 tokens end at byte 20, manifest.json says 11"):
        TokenBlocks([file], 5, 97)


def test_files_are_found_by_name(tmp_path):
    names = ["train.bin", "val.bin", "fineweb_train_000002.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    for name in names:
        write_tokens(tmp_path / name, STREAM)
    found = {split: [file.name for file in files] for split, files in bin_files(tmp_path).items()}
    assert found == {
        "train": ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "train.bin"],
        "validation": ["fineweb_val_000000.bin", "val.bin"],
    }
    found = bin_files(str(tmp_path / "fineweb_*.bin"))
    assert [len(files) for files in found.values()] == [2, 1]
    assert bin_files(tmp_path / "nowhere") == {"train": [], "validation": []}
    with pytest.raises(ValueError, match=r"has no validation files \(seen: train.bin"):
        bin_files(tmp_path / "train.bin")
    (tmp_path / "other.bin").touch()
    with pytest.raises(ValueError, match=r"other.bin is neither train\*.bin nor val\*.bin"):
        bin_files(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 10, 97, 100, 1000, 4097])
def test_every_pass_is_a_permutation_of_its_own(size):
    passes = [tuple(permuted(i, size, seed, epoch) for i in range(size)) for seed in (0, 1) for epoch in range(3)]
    for order in passes:
        assert sorted(order) == list(range(size)), f"not a permutation of {size}"
    assert size < 10 or len(set(passes)) == 6


def test_the_order_is_pinned_and_looks_random():
    assert [permuted(i, 10, 42, 0) for i in range(10)] == [3, 6, 0, 7, 9, 5, 2, 8, 4, 1]
    # Chi-square over where each of 5 goes, in 2,000 passes: 16 degrees of freedom, the 0.999 quantile is 39.3.
    table = np.zeros((5, 5))
    for epoch in range(2000):
        for i in range(5):
            table[i, permuted(i, 5, 7, epoch)] += 1
    assert ((table - 400) ** 2 / 400).sum() < 39.3
    # Neighbours land far apart: the mean distance of two random places is a third; its error here is 0.0024.
    order = np.array([permuted(i, 10_007, 3, 1) for i in range(10_007)])
    assert abs(np.abs(np.diff(order)).mean() / 10_007 - 1 / 3) < 0.0075
    assert abs(np.corrcoef(order, np.arange(10_007))[0, 1]) < 0.03  # three times 1 / sqrt(10,007)


def test_an_order_goes_over_the_blocks_again_and_again():
    order = Shuffled(list("abcdefg"), 25, seed=5)
    run = [order[i] for i in range(len(order))]
    assert len(run) == 25
    for start in (0, 7, 14):
        assert sorted(run[start : start + 7]) == list("abcdefg")
    longer = Shuffled(list("abcdefg"), 1000, seed=5)
    assert [longer[i] for i in range(25)] == run
    with pytest.raises(IndexError):
        order[25]
