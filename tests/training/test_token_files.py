"""MARSTrainer on files of tokens: resumed bit for bit, nothing read twice, one order for every layout."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import LENGTH, VOCAB, arguments, assert_same, gpt2, losses, weights

from mars_hf import MARSTrainer
from mars_hf.data import Shuffled, TokenBlocks, causal_collator, write_tokens
from mars_hf.data.order import permuted

BLOCKS, BATCH, STEPS, SEED = 22, 8, 6, 3  # 48 samples: two passes and a bit, and no pass ends with a step


class Recorded(TokenBlocks):
    """Knows which blocks were read."""

    def __getitem__(self, index):
        self.__dict__.setdefault("read", []).append(index)
        return super().__getitem__(index)


def blocks_in(folder):
    if not folder.is_dir():
        folder.mkdir(parents=True)
        tokens = np.random.default_rng(0).integers(VOCAB, size=BLOCKS * LENGTH)
        write_tokens(folder / "train0.bin", tokens[:100])
        write_tokens(folder / "train1.bin", tokens[100:], shard=True)
    return Recorded([folder / "train0.bin", folder / "train1.bin"], LENGTH, VOCAB)


def train(folder, resume=None, dropout=0.1, **settings):
    settings = {"per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential", **settings}
    args = arguments(folder, max_steps=STEPS, **settings)
    blocks = blocks_in(folder / "data")
    run = Shuffled(blocks, STEPS * BATCH, SEED)
    trainer = MARSTrainer(model=gpt2(dropout), args=args, train_dataset=run, data_collator=causal_collator)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, blocks.read if args.dataloader_num_workers == 0 else None


def order(steps):
    return [permuted(i % BLOCKS, BLOCKS, SEED, i // BLOCKS) for i in range(steps * BATCH)]


LAYOUTS = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "exact": {"is_approx": False, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bit_for_bit_and_reads_nothing_twice(tmp_path, layout):
    """Stopped within the first pass (2) and the second (4): 22 blocks are 2 3/4 steps."""
    straight, read = train(tmp_path / "run", save_strategy="steps", save_steps=2, **LAYOUTS[layout])
    assert read == order(STEPS), "the order is that of the permutations"
    for step in (2, 4):
        resumed, read = train(tmp_path / "on", str(tmp_path / "run" / f"checkpoint-{step}"), **LAYOUTS[layout])
        assert read == order(STEPS)[step * BATCH :], "only what was not trained on is read"
        assert_same(weights(resumed), weights(straight))
        assert losses(resumed)[step:] == losses(straight)[step:], f"losses from step {step} on"


def test_data_loader_workers_that_stay_change_nothing(tmp_path):
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    assert_same(weights(train(tmp_path / "with", **workers)[0]), weights(train(tmp_path / "without")[0]))


def test_two_processes_train_on_the_same_batches_and_resume(tmp_path):
    """Over gloo: the global batches of one process, the same parameters, and a resume of its own in the second pass."""
    for run in ("straight", "resumed"):
        blocks_in(tmp_path / run / "data")  # before two processes write the same files
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{i}.pt") for i in range(2)]
    for start, key in ((0, "straight"), (4, "resumed")):
        for step in range(STEPS - start):
            read = [block for rank in ranks for block in rank[key]["read"][step * 4 : step * 4 + 4]]
            expected = order(STEPS)[(start + step) * BATCH :][:BATCH]
            assert sorted(read) == sorted(expected), f"{key}: global batch of step {start + step}"
    assert_same(ranks[0]["resumed"]["weights"], ranks[0]["straight"]["weights"])
    one = train(tmp_path / "one", dropout=0.0)[0]
    # The mean over two processes rounds otherwise than that over eight rows.
    assert_same(ranks[0]["straight"]["weights"], weights(one), 1e-6)


def main(folder):
    """One of the two processes."""
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    record = {}
    for key, resume in (("straight", None), ("resumed", str(folder / "straight" / "checkpoint-4"))):
        trainer, read = train(folder / key, resume, 0.0, save_strategy="steps", save_steps=4, **split)
        record[key] = {"read": read, "weights": weights(trainer)}
    torch.save(record, folder / f"rank{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
