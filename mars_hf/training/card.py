"""The model card of a run: data, optimizer, loss curve and scores, in the README.md that the hub shows."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard

from mars_hf.training.arguments import mars_hyperparameters
from mars_hf.training.tracking import git_revision

TAG = "mars"
# No more evaluations than these are listed, evenly spaced; the figure shows all.
MOST_ROWS = 20

PACKAGE = (
    "mars_hf (MARS, [arXiv 2411.10438](https://arxiv.org/abs/2411.10438); MARS-M, "
    "[arXiv 2510.21800](https://arxiv.org/abs/2510.21800))"
)

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""


@dataclass
class CardDetails:
    """What a model card should tell and a Trainer does not know.

    Args:
        data: what the model was trained and evaluated on, in Markdown.
        results: "eval_loss", "perplexity", "bits_per_byte", and in "lm_eval" what `mars_hf.evaluation.evaluate`
            returned, as results.json of recipes/pretrain_gpt2.py has them; each may be missing.
        curve: a figure of the losses that lies beside the card.
    """

    data: str = ""
    results: Mapping[str, Any] = field(default_factory=dict)
    curve: Path | None = None


def complete_card(path: Path, trainer: Any, details: CardDetails) -> None:
    """Replaces the text of a card that the Trainer wrote, keeps its metadata, and adds the scores to them.

    Args:
        path: the card, README.md; modified in place.
        trainer: whose model, arguments and log history the card is about; only read.
        details: what else to tell.
    """
    card = ModelCard.load(path)
    name = path.resolve().parent.name
    scores = list(_scores(details.results))
    hyperparameters = mars_hyperparameters(trainer.args)  # none of another optimizer
    card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *([TAG] if hyperparameters else [])])) or None
    if scores:
        card.data.model_name = card.data.model_name or name
        card.data.eval_results = [
            EvalResult("text-generation", dataset, dataset, metric, value) for dataset, metric, value, _ in scores
        ]
    curve = f"![loss curve]({details.curve.name})\n\n" if details.curve else ""
    sections = {
        "Data": details.data,
        "Optimizer": _table(("hyperparameter", "value"), hyperparameters.items()),
        "Training": _table(("setting", "value"), _training(trainer).items()),
        "Loss": curve + _table(("step", "evaluation loss (nats a token)"), _losses(trainer.state.log_history)),
        "Scores": _table(("data", "metric", "score", "of"), ((d, m, f"{v:.4f}", of) for d, m, v, of in scores)),
        "Use": USE.format(name=trainer.args.hub_model_id or name),
    }
    text = "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items() if body)
    card.text = f"\n# {card.data.model_name or name}\n\n{_summary(trainer, hyperparameters.get('mars_type'))}\n{text}"
    card.save(path)


def _summary(trainer: Any, rule: str | None) -> str:
    model = trainer.accelerator.unwrap_model(trainer.model)
    # FSDP2 renames the class; ZeRO-3 leaves empty tensors that remember their size.
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    kind = type(model).__name__.removeprefix("FSDP")
    optimizer = f"{rule} of {PACKAGE}" if rule else _optim(trainer)
    steps = f"{trainer.state.global_step:,} steps"
    return f"{kind} with {parameters:,} parameters, trained for {steps} with {optimizer} in the Hugging Face Trainer."


def _optim(trainer: Any) -> str:
    """The name of the optimizer; that of the Trainer's own is a member of an enum."""
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


def _training(trainer: Any) -> dict[str, Any]:
    args = trainer.args
    return {
        "optim": _optim(trainer),
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": f"{args.lr_scheduler_type.value} {args.lr_scheduler_kwargs or ''}".strip(),
        "warmup_steps": args.get_warmup_steps(trainer.state.max_steps),
        "max_grad_norm": args.max_grad_norm,
        "sequences a step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "processes": args.world_size,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "float32",
        "seed": args.seed,
        "git revision": git_revision() or "none",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def _losses(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    evaluations = {row["step"]: f"{row['eval_loss']:.4f}" for row in history if "eval_loss" in row}
    rows = sorted(evaluations.items())
    # From the end, so that the last one is listed.
    return rows[:: -max(1, math.ceil(len(rows) / MOST_ROWS))][::-1]


def _scores(results: Mapping[str, Any]) -> Iterator[tuple[str, str, float, str]]:
    """Data, metric, value, and in words what the value stands on."""
    for key, metric in {"eval_loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}.items():
        if key in results:
            yield "held-out text", metric, results[key], "the validation part"
    # None where the scoring failed.
    for name, task in (results.get("lm_eval") or {}).get("tasks", {}).items():
        label = f"{name} ({task['num_fewshot']}-shot)"
        for metric in (key.removesuffix("_stderr") for key in task if key.endswith("_stderr")):
            if task[metric] is not None:
                yield label, metric, task[metric], f"{task['items']:,} items, {task['data']}"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "| --- " * len(header) + "|", *lines]) if lines else ""
