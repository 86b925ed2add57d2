"""Times a clip and a step of each optimizer against torch's clip and fused AdamW, all in turn in one run.

    python recipes/bench_step.py
    python recipes/bench_step.py --threads 1 --optimizers mars-adamw mars-adamw-fused
    python recipes/bench_step.py --baseline torch-muon --optimizers mars-m --rounds 5
    python recipes/bench_step.py --device cuda --model medium

Machines drift, so only the ratios of one run mean something: in every round each optimizer does one step, a ratio is
taken within the round, and the median over the rounds is printed, with the quartiles. The clip is that of MARSTrainer:
torch's, and for compiled steps the norm alone, whose factor the step takes. pytorch_optimizer's MARS runs along where
it is installed.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mars_hf import MARS

Params = list[nn.Parameter]

# GPT-2 shapes by width and layers, with biases (148 tensors, 124M parameters at 768 and 12), and many small tensors.
MODELS = {"small": (768, 12), "medium": (1024, 24), "tiny": (64, 2), "many": None}
RULES = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight")


def matrices_and_rest(params: Params) -> tuple[Params, Params]:
    """Embeddings, which come first, count as the rest."""
    matrices = [p for p in params[2:] if p.ndim == 2]
    return matrices, [*params[:2], *(p for p in params[2:] if p.ndim < 2)]


def mars(params: Params, rule: str, **options: Any) -> MARS:
    """Groups as `mars_param_groups` makes them."""
    if rule not in ("mars-m", "muon", "moonlight"):
        return MARS(params, mars_type=rule, **options)
    matrices, rest = matrices_and_rest(params)
    return MARS([{"params": matrices, "rule": rule}, {"params": rest, "rule": "adamw"}], mars_type=rule, **options)


class TorchMuon:
    """torch's Muon for the matrices, its fused AdamW for the rest."""

    def __init__(self, params: Params) -> None:
        matrices, rest = matrices_and_rest(params)
        self._muon = torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, fused=True)

    def step(self) -> None:
        self._muon.step()
        self._adamw.step()


OPTIMIZERS: dict[str, Callable[[Params], Any]] = {
    "torch-adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "torch-muon": TorchMuon,
    **{rule: lambda params, rule=rule: mars(params, rule) for rule in RULES},
    **{f"{rule}-fused": lambda params, rule=rule: mars(params, rule, fused=True) for rule in RULES[:4]},
}
PEER = "pytorch_optimizer"
if importlib.util.find_spec(PEER):
    OPTIMIZERS[PEER] = lambda params: importlib.import_module(PEER).MARS(params, lr=3e-3, mars_type="adamw")
DEFAULT = [name for name in OPTIMIZERS if name.startswith(("mars-adamw", "mars-lion", PEER))]


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters, embeddings first, head tied."""
    sizes = MODELS[model]
    if sizes is None:
        return [(25, 40)] * 1000
    width, layers = sizes
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def timed(optimizer: Any, params: Params, max_grad_norm: float) -> float:
    """Seconds of a clip and a step, the work on the device included."""
    synchronize = torch.accelerator.synchronize if params[0].device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    if max_grad_norm and isinstance(optimizer, MARS) and optimizer.defaults["fused"]:
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        optimizer.grad_scale = torch.clamp((norm + 1e-6) / max_grad_norm, min=1.0)
    elif max_grad_norm:
        nn.utils.clip_grad_norm_(params, max_grad_norm)
    optimizer.step()
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=DEFAULT, choices=list(OPTIMIZERS))
    parser.add_argument("--baseline", default="torch-adamw", choices=list(OPTIMIZERS), help="what ratios are taken to")
    parser.add_argument(
        "--model", default="small", choices=list(MODELS), help="GPT-2 shapes, or 1,000 tensors of 1,000"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--grad_norm", type=float, default=0.5, help="global norm of the gradients")
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="the clip before each step; 0: the step alone")
    parser.add_argument("--output", type=Path, help="JSON file for the times of all rounds")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"argument --rounds: {args.rounds} must be at least 2, for the quartiles")
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as error:  # as torch says that it was built without, or finds no driver
        parser.error(f"argument --device: {args.device} cannot be used: {str(error).splitlines()[0]}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, device=args.device)) for shape in shapes_of(args.model)]
    for p in params:
        p.grad = torch.randn_like(p)
    nn.utils.clip_grad_norm_(params, args.grad_norm)
    grads = [p.grad for p in params]
    optimizers = {name: OPTIMIZERS[name](params) for name in dict.fromkeys([args.baseline, *args.optimizers])}
    numel = sum(p.numel() for p in params)
    print(f"{len(params)} tensors, {numel:,} parameters, float32, {args.device}, torch {torch.__version__}")
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.warmup + args.rounds):
        for name, optimizer in optimizers.items():
            for p, g in zip(params, grads):
                p.grad = g  # there are optimizers that take it away
            times[name].append(timed(optimizer, params, args.max_grad_norm))
    times = {name: values[args.warmup :] for name, values in times.items()}
    print("| | median ms | ratio | quartiles |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times[args.baseline])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {1000 * statistics.median(values):.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    if args.output:
        args.output.write_text(json.dumps({"parameters": numel, "settings": vars(args), "seconds": times}, default=str))


if __name__ == "__main__":
    main()
