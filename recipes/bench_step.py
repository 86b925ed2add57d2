"""Times one optimizer step against torch's fused AdamW, all optimizers in turn in one run.

    python recipes/bench_step.py
    python recipes/bench_step.py --rounds 31 --optimizers mars-adamw --grad_norm 1.0

Machines drift, so only the ratios of one run mean something: in every round each optimizer does one step, a ratio is
taken within the round, and the median over the rounds is printed. Gradients are random with the global norm of
--grad_norm; on CPU, MARS is faster where its clip of c cannot bite, so 1.0, the usual global clip, is the slow end.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mars_hf import MARS

# Width and layers of the GPT-2 shapes with biases: 148 tensors, 124M parameters at 768 and 12.
MODELS = {"small": (768, 12), "medium": (1024, 24), "tiny": (64, 2)}
BASELINE = "adamw-fused"
OPTIMIZERS: dict[str, Callable] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw": lambda params: MARS(params, mars_type="adamw"),
    "mars-adamw": MARS,
    "mars-adamw-bf16": lambda params: MARS(params, last_grad_dtype=torch.bfloat16),
    "mars-adamw-fused": lambda params: MARS(params, fused=True),
    "mars-adamw-bf16-fused": lambda params: MARS(params, last_grad_dtype=torch.bfloat16, fused=True),
    "mars-lion": lambda params: MARS(params, mars_type="mars-lion"),
    "mars-lion-fused": lambda params: MARS(params, mars_type="mars-lion", fused=True),
    "mars-shampoo": lambda params: MARS(params, mars_type="mars-shampoo"),
    "mars-m": lambda params: MARS(orthogonalised(params, "mars-m"), mars_type="mars-m"),
    "moonlight": lambda params: MARS(orthogonalised(params, "moonlight"), mars_type="moonlight"),
}
DEFAULT = ["adamw-fused", "adamw-foreach", "adamw", "mars-adamw", "mars-adamw-bf16", "mars-lion"]


def orthogonalised(params: list[torch.nn.Parameter], rule: str) -> list[dict]:
    """Groups as `mars_param_groups` makes them: the two embeddings and the vectors go to AdamW."""
    matrices = [p for p in params[2:] if p.ndim == 2]
    rest = [*params[:2], *(p for p in params[2:] if p.ndim < 2)]
    return [{"params": matrices, "rule": rule}, {"params": rest, "rule": "adamw"}]


def gpt2_shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    """Shapes of GPT-2's parameters, embeddings first, head tied."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=DEFAULT, choices=list(OPTIMIZERS))
    parser.add_argument("--model", default="small", choices=list(MODELS), help="GPT-2 shapes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--grad_norm", type=float, default=0.5, help="global norm of the gradients")
    parser.add_argument("--output", type=Path, help="JSON file for the times of all rounds")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(s, device=args.device)) for s in gpt2_shapes(*MODELS[args.model])]
    for p in params:
        p.grad = torch.randn_like(p)
    torch.nn.utils.clip_grad_norm_(params, args.grad_norm)
    names = list(dict.fromkeys([BASELINE, *args.optimizers]))
    optimizers = {name: OPTIMIZERS[name](params) for name in names}
    numel = sum(p.numel() for p in params)
    print(f"{len(params)} tensors, {numel:,} parameters, float32, {args.device}, torch {torch.__version__}")

    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.warmup + args.rounds):
        for name, optimizer in optimizers.items():
            times[name].append(timed(optimizer.step, args.device))
    times = {name: values[args.warmup :] for name, values in times.items()}
    print(f"{'optimizer':21} {'median ms':>10} {'ratio':>7} {'(quartiles)':>14}")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times[BASELINE])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:21} {1000 * statistics.median(values):10.1f} {middle:7.2f} {f'({low:.2f}-{high:.2f})':>14}")
    if args.output:
        args.output.write_text(json.dumps({"parameters": numel, "device": args.device, "seconds": times}, indent=2))


def timed(step: Callable, device: str) -> float:
    """Seconds of a call, the work on the device included."""
    synchronize = torch.accelerator.synchronize if device != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
