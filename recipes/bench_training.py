"""Tokens per second of the recipe's training, against a plain training loop beside it.

    python recipes/bench_training.py --rounds 4
    python recipes/bench_training.py --model small --block_size 64 --batch_size 4 --steps 8 --rounds 3
    python recipes/bench_training.py --torch_compile --steps 30 --warmup 4 --rounds 3
    python recipes/bench_training.py --profile

The loop is what a research script has: its own GPT-2 without a bias, batches cut from one array of tokens, torch's
clip and fused AdamW, a schedule. The recipe's side is MARSTrainer with the settings of the quick start, Hugging Face's
GPT-2 made lean and the packed dataset, and logs as often. Both train the same sizes on batches of the same shape in
float32. The recipe keeps the memory it frees (mars_hf/training/cpu.py); so does the second of the plain loops.

Machines drift, so only the ratios of one run mean something: in every round each side trains --steps steps in a process
of its own, of which the first --warmup do not count, a ratio is taken within the round, and the median over the rounds
is printed.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from torch.profiler import profile
from transformers import TrainerCallback
from transformers.utils import logging

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.data import causal_collator
from mars_hf.models import build_gpt2, gpt2_config, make_lean
from mars_hf.training.cpu import keep_freed_memory

# layers, heads, width, vocabulary, block size, sequences a step
MODELS = {"quickstart": (4, 4, 192, 2048, 128, 16), "small": (12, 12, 768, 50304, 128, 4)}
LOGGING_STEPS = 10
LOOP, KEPT = "plain loop, adamw", "the same, memory kept"
RECIPE = {
    "recipe, adamw": {"mars_type": "adamw", "mars_beta1": 0.9, "mars_beta2": 0.95},
    "recipe, mars": {},
    "recipe, mars, mars_fused": {"mars_fused": True},
}


class Block(nn.Module):
    """Attention and a layer of four times the width, both after a norm and added to what came in."""

    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / (number * math.sqrt(width // heads))
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2 with a tied head; returns the loss."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int, block_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, i + 1) for i in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.size(1), device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.tokens.weight.T).flatten(0, 1), targets.flatten())


def plain_loop(tokens: Tensor, sizes: tuple[int, ...], steps: int, compiled: bool) -> list[float]:
    """When each step began, and when the last one ended, in seconds."""
    *model_sizes, block_size, batch_size = sizes
    model: Any = PlainGPT2(*model_sizes, block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model
    times = []
    for step in range(steps):
        times.append(time.perf_counter())
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        starts = torch.randint(len(tokens) - block_size - 1, (batch_size,)).tolist()
        inputs = torch.stack([tokens[i : i + block_size] for i in starts])
        targets = torch.stack([tokens[i + 1 : i + 1 + block_size] for i in starts])
        loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % LOGGING_STEPS == 0:
            loss.item()
    return [*times, time.perf_counter()]


class Clock(TrainerCallback):
    """Keeps when each step began, and when the last one ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def recipe(
    tokens: Tensor, sizes: tuple[int, ...], steps: int, compiled: bool, optimizer: dict[str, Any]
) -> list[float]:
    """The same of MARSTrainer, in the order of the recipe."""
    keep_freed_memory()
    layers, heads, width, vocabulary, block_size, batch_size = sizes
    config = gpt2_config(
        **{"n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": vocabulary, "n_positions": block_size}
    )
    blocks = Dataset.from_dict({"input_ids": tokens[: len(tokens) // block_size * block_size].view(-1, block_size)})
    model = build_gpt2(config)
    make_lean(model, compiled=compiled)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = MARSTrainingArguments(
            output_dir=folder,
            **{"optim": "mars", "learning_rate": 6e-3, "weight_decay": 0.01, "mars_decay": "authors", **optimizer},
            **{"max_steps": steps, "per_device_train_batch_size": batch_size, "logging_steps": LOGGING_STEPS},
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "torch_compile": compiled},
            dataloader_pin_memory=False,
        )
        trainer = MARSTrainer(
            model=model,
            args=args,
            train_dataset=blocks.with_format("torch"),
            data_collator=causal_collator,
            callbacks=[clock],
        )
        trainer.train()
    return clock.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", choices=list(MODELS), help="sizes of the model")
    parser.add_argument("--block_size", type=int, help="tokens of a sequence, if not those of the model")
    parser.add_argument("--batch_size", type=int, help="sequences a step, if not those of the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--steps", type=int, default=30, help="steps of each side in a round")
    parser.add_argument("--warmup", type=int, default=2, help="of these, the first ones that do not count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch_compile", action="store_true", help="compile both models")
    parser.add_argument("--profile", action="store_true", help="the costliest operations of both sides instead")
    parser.add_argument("--output", type=Path, help="JSON file for the figures of all rounds")
    parser.add_argument("--side", choices=[LOOP, KEPT, *RECIPE], help="train this one alone, and print its figures")
    args = parser.parse_args()
    if args.warmup + 1 >= args.steps:
        parser.error(f"argument --steps: {args.steps} must be two more than --warmup {args.warmup}")
    if args.side:
        print(json.dumps(train(args)))
        return
    if args.profile:
        for args.side in (LOOP, "recipe, mars, mars_fused"):
            with profile() as profiled:
                train(args)
            print(args.side, profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=15), sep="\n")
        return

    sides = [LOOP, KEPT, *RECIPE]
    figures: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side in sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures[side].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':26} {'tokens/s':>9} {'by the loop':>12} {'(lowest-highest)':>18} {'peak GB':>8}")
    for side, rounds in figures.items():
        rates, peak = [one["tokens_per_second"] for one in rounds], max(one["peak_gb"] for one in rounds)
        ratios = [rate / base["tokens_per_second"] for rate, base in zip(rates, figures[LOOP])]
        spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{side:26} {statistics.median(rates):9.0f} {statistics.median(ratios):12.2f} {spread:>18} {peak:8.2f}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        args.output.write_text(json.dumps({"settings": settings, "figures": figures}, indent=2))


def train(args: argparse.Namespace) -> dict[str, float]:
    """Trains `args.side` and returns its tokens per second and its process's peak memory."""
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    *model, block_size, batch_size = MODELS[args.model]
    sizes = (*model, args.block_size or block_size, args.batch_size or batch_size)
    tokens = torch.randint(sizes[3], (sizes[4] * 2000,), generator=torch.Generator().manual_seed(0))
    if args.side in RECIPE:
        times = recipe(tokens, sizes, args.steps, args.torch_compile, RECIPE[args.side])
    else:
        if args.side == KEPT:
            keep_freed_memory()
        times = plain_loop(tokens, sizes, args.steps, args.torch_compile)
    counted = times[args.warmup :]
    rate = (len(counted) - 1) * sizes[4] * sizes[5] / (counted[-1] - counted[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)
    return {"tokens_per_second": rate, "peak_gb": peak}


if __name__ == "__main__":
    main()
