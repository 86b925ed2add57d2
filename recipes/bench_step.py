"""Times an optimizer step, clip included, against torch's clip and fused AdamW, all optimizers in turn in one run.

    python recipes/bench_step.py
    python recipes/bench_step.py --optimizers mars-adamw mars-adamw-fused --rounds 31 --max_grad_norm 0
    python recipes/bench_step.py --baseline muon --optimizers mars-m --rounds 5
    python recipes/bench_step.py --optimizers mars-adamw-fused peers --authors ../MARS --output runs/bench.json
    python recipes/bench_step.py --device cuda --model medium

Machines drift, so only the ratios of one run mean something: in every round each optimizer does one step, a ratio is
taken within the round, and the median over the rounds is printed. Gradients are random with the global norm of
--grad_norm; on CPU, MARS is faster where its clip of c cannot bite, so 1.0, the usual global clip, is the slow end.
The clip is torch's.
`peers` are pytorch_optimizer, timm and heavyball, where installed, and the authors' code, where --authors says.
"""

import argparse
import importlib
import json
import statistics
import sys
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


def orthogonalised(params: Params, rule: str) -> list[dict[str, Any]]:
    """Groups as `mars_param_groups` makes them: the two embeddings and the vectors go to AdamW."""
    matrices, rest = matrices_and_rest(params)
    groups = [{"params": matrices, "rule": rule}, {"params": rest, "rule": "adamw"}]
    return [group for group in groups if group["params"]]


def matrices_and_rest(params: Params) -> tuple[Params, Params]:
    matrices = [p for p in params[2:] if p.ndim == 2]
    return matrices, [*params[:2], *(p for p in params[2:] if p.ndim < 2)]


class TorchMuon:
    """torch's Muon for the matrices, its fused AdamW for the rest."""

    def __init__(self, params: Params) -> None:
        matrices, rest = matrices_and_rest(params)
        self._both = (
            torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, fused=True),
        )

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()


OPTIMIZERS: dict[str, Callable[[Params], Any]] = {
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
    "muon": TorchMuon,
}
COMPILED = [name for name in OPTIMIZERS if name.startswith("mars-") and name.endswith("-fused")]
DEFAULT = ["adamw-fused", "adamw-foreach", "mars-adamw", "mars-adamw-fused", "mars-lion", "mars-lion-fused"]

# Module and class of other packages' MARS-AdamW, and their arguments.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pytorch_optimizer": ("pytorch_optimizer", "MARS", {"lr": 3e-3, "mars_type": "adamw"}),
    "timm": ("timm.optim", "Mars", {"lr": 3e-3, "caution": False}),
    "heavyball": ("heavyball", "AdamW", {"lr": 3e-3, "mars": True}),
}


def peers(authors: Path | None) -> dict[str, Callable[[Params], Any]]:
    """Those that can be imported; says which cannot."""
    wanted = dict(PEERS)
    if authors is not None:
        sys.path.insert(0, str(authors / "MARS" if (authors / "MARS").is_dir() else authors))
        wanted["authors"] = ("optimizers.mars", "MARS", {"lr": 3e-3, "mars_type": "mars-adamw"})
    found: dict[str, Callable[[Params], Any]] = {}
    for name, (module, attribute, arguments) in wanted.items():
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"{name} is left out: {error}")
            continue
        found[name] = lambda params, cls=cls, arguments=arguments: cls(params, **arguments)
    return found


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters, embeddings first, head tied."""
    sizes = MODELS[model]
    if sizes is None:
        return [(25, 40)] * 1000
    width, layers = sizes
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=DEFAULT, choices=[*OPTIMIZERS, "peers"])
    parser.add_argument("--baseline", default="adamw-fused", choices=list(OPTIMIZERS), help="what ratios are taken to")
    parser.add_argument(
        "--model", default="small", choices=list(MODELS), help="GPT-2 shapes, or 1,000 tensors of 1,000"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--grad_norm", type=float, default=0.5, help="global norm of the gradients")
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="the clip before each step; 0: the step alone")
    parser.add_argument("--authors", type=Path, help="a checkout of the authors' code, for peers")
    parser.add_argument("--output", type=Path, help="JSON file for the times of all rounds; a plot goes beside it")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"argument --rounds: {args.rounds} must be at least 2, for the quartiles")
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as error:  # as torch says that it was built without, or finds no driver
        parser.error(f"argument --device: {args.device} cannot be used: {str(error).splitlines()[0]}")
    if args.device == "cpu":
        torch.set_num_threads(args.threads)

    wanted = [name for name in [args.baseline, *args.optimizers] if name != "peers"]
    if args.device != "cpu":
        for name in [name for name in wanted if name in COMPILED]:
            print(f"{name} is left out: a compiled pass of the CPU")
            wanted.remove(name)
    builders = {name: OPTIMIZERS[name] for name in wanted}
    if "peers" in args.optimizers:
        builders |= peers(args.authors)
    torch.manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, device=args.device)) for shape in shapes_of(args.model)]
    for p in params:
        p.grad = torch.randn_like(p)
    nn.utils.clip_grad_norm_(params, args.grad_norm)
    grads = [p.grad for p in params]
    optimizers = {name: build(params) for name, build in builders.items()}
    numel = sum(p.numel() for p in params)
    clip = f"clip_grad_norm_({args.max_grad_norm}) + step" if args.max_grad_norm else "step alone"
    print(f"{len(params)} tensors, {numel:,} parameters, float32, {args.device}, torch {torch.__version__}, {clip}")

    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.warmup + args.rounds):
        for name, optimizer in optimizers.items():
            for p, g in zip(params, grads):
                p.grad = g  # there are optimizers that take it away
            times[name].append(timed(optimizer, params, args.max_grad_norm, args.device))
    times = {name: values[args.warmup :] for name, values in times.items()}
    report(times, args.baseline)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        args.output.write_text(json.dumps({"parameters": numel, "settings": settings, "seconds": times}, indent=2))
        plot(
            times,
            args.baseline,
            args.output.with_suffix(".png"),
            f"{args.model}, {numel:,} parameters, {args.device}: {clip}",
        )


def timed(optimizer: Any, params: Params, max_grad_norm: float, device: str) -> float:
    """Seconds of a clip and a step, the work on the device included."""
    synchronize = torch.accelerator.synchronize if device != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    if max_grad_norm:
        nn.utils.clip_grad_norm_(params, max_grad_norm)
    optimizer.step()
    synchronize()
    return time.perf_counter() - start


def ratios(times: dict[str, list[float]], name: str, baseline: str) -> list[float]:
    return [value / base for value, base in zip(times[name], times[baseline])]


def report(times: dict[str, list[float]], baseline: str) -> None:
    print(f"{'optimizer':22} {'median ms':>10} {'ratio':>7} {'(quartiles)':>14}")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(ratios(times, name, baseline), n=4)
        print(f"{name:22} {1000 * statistics.median(values):10.1f} {middle:7.2f} {f'({low:.2f}-{high:.2f})':>14}")


def plot(times: dict[str, list[float]], baseline: str, path: Path, title: str) -> None:
    """A bar for each optimizer: the median ratio, with the quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    quartiles = {name: statistics.quantiles(ratios(times, name, baseline), n=4) for name in times}
    middles = [middle for _, middle, _ in quartiles.values()]
    errors = [[q[1] - q[0] for q in quartiles.values()], [q[2] - q[1] for q in quartiles.values()]]
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.35 * len(times)), layout="constrained")
    axes.barh(list(times), middles, xerr=errors, color="0.6", edgecolor="black")
    axes.axvline(1, color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel=f"time by that of {baseline}", title=title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
