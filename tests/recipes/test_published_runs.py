"""Every published run of the papers: what its YAML file builds, against the tables of the papers written out here."""

import pytest
import torch
from transformers import get_scheduler

from mars_hf import MARS
from mars_hf.models import build_model
from mars_hf.training.config import parse_config
from mars_hf.training.dry_run import apply_global_batch
from mars_hf.training.trainer import mars_optimizer

# layers, width, the end of the cosine, micro-batch x accumulation on 8 GPUs
SIZES = {
    "small": (12, 768, 3e-5, 15, 4),
    "medium": (24, 1024, 6e-5, 15, 4),
    "large": (36, 1280, 1e-5, 5, 12),
    "xl": (48, 1600, 1e-5, 5, 12),
}
# Peak learning rate, and of AdamW-ruled parameters where it is another one. No Muon of size xl was published.
LEARNING_RATES = {
    "small": {"adamw": 6e-4, "mars_adamw": (6e-3, 3e-3), "muon": (2e-2, 3e-3), "mars_m": 6e-3, "moonlight": 6e-3},
    "medium": {"adamw": 3e-4, "mars_adamw": (3e-3, 1.5e-3), "muon": (1e-2, 1.5e-3), "mars_m": 5e-3, "moonlight": 5e-3},
    "large": {"adamw": 2e-4, "mars_adamw": (2e-3, 1e-3), "muon": (6.67e-3, 1e-3), "mars_m": 5e-3, "moonlight": 5e-3},
    "xl": {"adamw": 2e-4, "mars_adamw": (2e-3, 1e-3), "mars_m": 3e-3, "moonlight": 3e-3},
}
# Rule, betas and weight decay of Linear weights, then of embeddings, then of norm gains.
MARS_BETAS, ADAMW_BETAS = (0.95, 0.99), (0.9, 0.95)
GROUPS = {
    "adamw": [("adamw", ADAMW_BETAS, 0.1), ("adamw", ADAMW_BETAS, 0.0), ("adamw", ADAMW_BETAS, 0.0)],
    "mars_adamw": [("mars-adamw", MARS_BETAS, 0.01), ("mars-adamw", MARS_BETAS, 0.0), ("adamw", ADAMW_BETAS, 0.1)],
    "muon": [("muon", (0.95, 0.99), 0.0), ("adamw", ADAMW_BETAS, 0.1), ("adamw", ADAMW_BETAS, 0.1)],
    "mars_m": [("mars-m", MARS_BETAS, 0.01), ("adamw", ADAMW_BETAS, 0.01), ("adamw", ADAMW_BETAS, 0.01)],
    "moonlight": [("moonlight", (0.95, 0.99), 0.1), ("adamw", ADAMW_BETAS, 0.1), ("adamw", ADAMW_BETAS, 0.1)],
}
RUNS = [(size, optimizer) for size, rates in LEARNING_RATES.items() for optimizer in rates]
PROCESSES = 8


@pytest.fixture(scope="module")
def planned(recipe, root):
    """Parses the file of a run, with a plan for 8 processes, and builds its model on the meta device."""
    models = {}

    def build(size, optimizer, *options):
        path = root / "recipes" / "configs" / f"gpt2_{size}" / f"{optimizer}.yaml"
        plan = ["--dry_run", "--processes", str(PROCESSES)]
        data, model_args, _, plan, args = parse_config(recipe.ARGUMENTS, ["--config", str(path), *plan, *options])
        apply_global_batch(args, plan)
        if size not in models:
            with torch.device("meta"):
                config = recipe.configuration(recipe.planned_vocabulary(data), data.block_size, model_args)
                models[size] = build_model(config, bias=model_args.bias)
        return data, args, models[size]

    return build


def build_optimizer(args, model):
    cls, arguments = mars_optimizer(args, model, None)
    assert cls is MARS
    return cls(**arguments)


def expected_groups(size, optimizer):
    """Parameters by what their group must say: rule, lr, betas, weight decay, gamma and the clip of c (MARS alone)."""
    layers, width, _, _, accumulation = SIZES[size]
    # Per layer: 3 width^2 + width^2 in attention, 4 + 4 in the MLP; 50,304 tokens and 1,024 positions; 2 gains a layer.
    kinds = (layers * 12 * width**2, (50304 + 1024) * width, (2 * layers + 1) * width)
    rates = LEARNING_RATES[size][optimizer]
    matrix_lr, other_lr = rates if isinstance(rates, tuple) else (rates, rates)
    expected = {}
    for count, (rule, betas, decay) in zip(kinds, GROUPS[optimizer], strict=True):
        lr = other_lr if rule == "adamw" and optimizer != "adamw" else matrix_lr
        mars = (0.025, 1 / accumulation) if rule.startswith("mars-") else ()
        key = (rule, lr, betas, decay, *mars)
        expected[key] = expected.get(key, 0) + count
    return expected


@pytest.mark.parametrize("optimizer", GROUPS)
@pytest.mark.parametrize("size", SIZES)
def test_param_groups_are_those_of_the_paper(planned, root, size, optimizer):
    if (size, optimizer) not in RUNS:
        path = root / "recipes" / "configs" / f"gpt2_{size}" / f"{optimizer}.yaml"
        assert not path.exists(), f"{path}: no such run was published"
        return
    data, args, model = planned(size, optimizer)
    groups = {}
    for group in build_optimizer(args, model).param_groups:
        mars = (group["gamma"], group["clip_c"]) if group["rule"].startswith("mars-") else ()
        key = (group["rule"], group["lr"], group["betas"], group["weight_decay"], *mars)
        groups[key] = groups.get(key, 0) + sum(p.numel() for p in group["params"])
        flags = (group["is_approx"], group["memory_efficient"], group["amsgrad"], group["nesterov"], group["eps"])
        assert flags == (True, False, False, True, 1e-8), f"{size} {optimizer} {group['rule']}: {flags}"
    assert groups == expected_groups(size, optimizer), f"{size} {optimizer}: parameters by rule, lr, betas, decay, ..."
    layers, width, min_lr, micro_batch, accumulation = SIZES[size]
    assert (model.config.n_layer, model.config.n_embd) == (layers, width), f"{size}: layers, width"
    batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps, data.block_size)
    assert batch == (micro_batch, accumulation, 1024), f"{size} {optimizer}: micro-batch, accumulation, block"
    assert batch[0] * batch[1] * PROCESSES == 480, f"{size} {optimizer}: sequences a step"
    assert args.max_grad_norm == 1 / accumulation, f"{size} {optimizer}: the global clip of a mean"
    run = (args.max_steps, args.warmup_steps, str(args.lr_scheduler_type.value), args.bf16)
    assert run == (100_000, 2_000, "cosine_with_min_lr", True), f"{size} {optimizer}: steps, warm-up, schedule, bf16"
    assert args.lr_scheduler_kwargs == {"min_lr": min_lr}, f"{size} {optimizer}: the end of the cosine"
    assert (data.dataset_path, args.output_dir) == ("data/openwebtext", f"runs/gpt2_{size}_{optimizer}")


@pytest.mark.parametrize(("size", "optimizer"), [("small", "mars_adamw"), ("large", "muon"), ("xl", "adamw")])
def test_the_schedule_ends_at_min_lr_and_lr_1d_in_proportion(planned, size, optimizer):
    """The Trainer's own scheduler at the start, half way up, at the peak, half way down, at the end."""
    _, args, model = planned(size, optimizer)
    built = build_optimizer(args, model)
    peaks = [group["lr"] for group in built.param_groups]
    scheduler = get_scheduler(
        args.lr_scheduler_type, built, args.get_warmup_steps(args.max_steps), args.max_steps, args.lr_scheduler_kwargs
    )
    floor = SIZES[size][2] / args.learning_rate
    expected = {0: 0.0, 1000: 0.5, 2000: 1.0, 51_000: (1 + floor) / 2, 100_000: floor}
    for step, factor in expected.items():
        lrs = [peak * schedule(step) for peak, schedule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        assert lrs == pytest.approx([peak * factor for peak in peaks], rel=1e-12), f"learning rates at step {step}"
    assert args.learning_rate * floor == SIZES[size][2] and peaks[0] == args.learning_rate, "the matrices' min_lr"


def test_fineweb_edu_is_the_same_run_on_other_data(planned):
    ours = ["--dataset_path", "data/fineweb-edu-100bt", "--output_dir", "runs/fineweb_edu"]
    (data, args, _), (same_data, same_args, _) = planned("small", "mars_adamw", *ours), planned("small", "mars_adamw")
    different = {name for name, value in vars(data).items() if value != vars(same_data)[name]}
    assert different == {"dataset_path"}
    for name in ("learning_rate", "max_steps", "lr_scheduler_kwargs", "mars_clip_c", "gradient_accumulation_steps"):
        assert getattr(args, name) == getattr(same_args, name), name


@pytest.mark.parametrize(
    ("options", "accumulation"),
    [
        (["--processes", "4"], 8),
        (["--processes", "1"], 32),
        (["--per_device_train_batch_size", "12"], 5),
        (["--per_device_train_batch_size", "60"], 1),
    ],
)
def test_the_global_batch_stays_on_other_numbers_of_gpus(planned, options, accumulation):
    _, args, _ = planned("small", "mars_adamw", *options)
    assert args.gradient_accumulation_steps == accumulation
    # The mean gradient is that of the same 480 sequences: its thresholds stay.
    assert args.max_grad_norm == args.mars_clip_c == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "7"], "global_batch_size=480 is no multiple of per_device_train_batch_size=15 x 7 proc"),
        (
            ["--processes", "64"],
            "global_batch_size=480 is no multiple of per_device_train_batch_size=15 x 64 proc",
        ),
        (["--gradient_accumulation_steps", "5"], "gradient_accumulation_steps=5 contradicts global_batch_size=480"),
        (["--processes", "0"], "processes=0: give it with --dry_run, 1 or more"),
        (["--dry_run", "false"], "processes=8: give it with --dry_run, 1 or more"),
    ],
)
def test_a_global_batch_that_cannot_be_is_one_line(planned, options, message):
    with pytest.raises(ValueError, match=message) as error:
        planned("small", "mars_adamw", *options)
    assert "\n" not in str(error.value)


def test_there_is_a_file_for_every_published_run_and_no_setting_stands_twice(root):
    """A run says what it builds on, its learning rates and its folder; all else stands in a file that others share."""
    configs = root / "recipes" / "configs"
    runs = {path for path in configs.glob("gpt2_*/*.yaml") if path.name != "base.yaml"}
    assert runs == {configs / f"gpt2_{size}" / f"{optimizer}.yaml" for size, optimizer in RUNS}
    for path in runs:
        keys = [line.split(":")[0] for line in path.read_text().splitlines()]
        assert set(keys) <= {"base", "learning_rate", "lr_1d", "output_dir"}, f"{path}: {keys}"
