"""--optim mars and its hyperparameters: parsing, help, serialisation, errors."""

import json

import pytest
import torch
from transformers import HfArgumentParser
from transformers.training_args import OptimizerNames

from mars_hf import MARSTrainingArguments
from mars_hf.training.arguments import mars_arguments
from mars_hf.training.config import parse_config


def parse(*options, output_dir="unused"):
    return HfArgumentParser(MARSTrainingArguments).parse_args_into_dataclasses(["--output_dir", output_dir, *options])[
        0
    ]


def constructor(args):
    hyper = mars_arguments(args)
    return hyper.constructor_arguments(hyper.rule(args.optim), args.learning_rate, args.weight_decay, args.adam_epsilon)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mars", "mars-adamw"),
        ("mars_adamw", "mars-adamw"),
        ("mars_lion", "mars-lion"),
        ("mars_shampoo", "mars-shampoo"),
        ("mars_m", "mars-m"),
    ],
)
def test_each_name_is_a_rule(name, rule):
    args = parse("--optim", name)
    assert args.optim == name
    assert constructor(args)["mars_type"] == rule


def test_trainer_arguments_keep_their_meaning():
    options = ["--learning_rate", "6e-3", "--weight_decay", "0.01", "--adam_epsilon", "1e-6", "--mars_gamma", "0.05"]
    options += ["--lr_1d", "1e-3", "--beta1_1d", "0.8", "--beta2_1d", "0.999", "--mars_clip_c", "0"]
    options += ["--mars_ns_dtype", "float32", "--mars_last_grad_dtype", "bfloat16", "--optimize_1d"]
    options += ["--mars_beta1", "0.9", "--mars_beta2", "0.98", "--mars_amsgrad", "--mars_memory_efficient"]
    options += ["--mars_ns_steps", "3", "--no_mars_nesterov", "--weight_decay_1d", "0.2", "--is_approx", "False"]
    options += ["--mars_fused"]
    arguments = constructor(parse(*options))
    assert arguments == {
        "lr": 6e-3,
        "betas": (0.9, 0.98),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "amsgrad": True,
        "gamma": 0.05,
        "is_approx": False,
        "mars_type": "mars-adamw",
        "optimize_1d": True,
        "lr_1d": 1e-3,
        "betas_1d": (0.8, 0.999),
        "weight_decay_1d": 0.2,
        "clip_c": None,
        "memory_efficient": True,
        "last_grad_dtype": torch.bfloat16,
        "ns_steps": 3,
        "ns_dtype": torch.float32,
        "nesterov": False,
        "fused": True,
    }


@pytest.mark.parametrize(("mars_type", "lr_1d"), [("mars-adamw", 2e-3), ("mars-m", 4e-3), ("moonlight", 4e-3)])
def test_default_lr_of_vectors(mars_type, lr_1d):
    assert constructor(parse("--mars_type", mars_type, "--learning_rate", "4e-3"))["lr_1d"] == lr_1d


def test_optim_args_set_the_same_fields():
    args = parse("--optim_args", "gamma=0.05, lr_1d=1e-3,mars_beta2=0.98,clip_c=none,is_approx=true,ns_steps=3")
    hyper = mars_arguments(args)
    assert (hyper.mars_gamma, hyper.lr_1d, hyper.mars_beta2, hyper.mars_clip_c) == (0.05, 1e-3, 0.98, None)
    assert (hyper.is_approx, hyper.mars_ns_steps) == (True, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optim", "mras"], "optim='mras' is unknown: did you mean 'mars'"),
        (["--optim", "muon"], "optim='muon' is unknown: use --optim mars --mars_type muon"),
        (["--optim", "adamw_torhc"], "did you mean 'adamw_torch'"),
        (["--optim_args", "gama=0.1"], "did you mean 'gamma'"),
        (["--optim_args", "gamma"], "has no value"),
        (["--optim_args", "gamma=much"], "gamma='much'"),
        (["--optim_args", "gamma=none"], "gamma='none'"),
        (["--optim", "mars_lion", "--mars_type", "mars-m"], "contradicts optim='mars_lion'"),
        (["--mars_type", "mars-k"], "mars_type='mars-k' is unknown"),
    ],
)
def test_wrong_values_are_one_line_errors(options, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(*options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beta1_1d", "0.8"], "give both or neither"),
        (["--mars_type", "muon"], "pass lr_1d"),
        (["--mars_ns_dtype", "bf16"], "mars_ns_dtype='bf16' is unknown"),
    ],
)
def test_contradictions_are_errors_when_the_optimizer_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        constructor(parse(*options))


def test_other_optimizers_stay_the_trainers():
    args = parse("--optim", "adamw_torch")
    assert args.optim is OptimizerNames.ADAMW_TORCH


def test_serialisation_round_trip(tmp_path):
    args = parse("--optim", "mars_m", "--mars_gamma", "0.05", output_dir=str(tmp_path))
    as_dict = args.to_dict()
    assert (as_dict["optim"], as_dict["mars_gamma"]) == ("mars_m", 0.05)
    assert json.loads(args.to_json_string())["optim"] == "mars_m"
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.to_dict() == as_dict


def test_help_names_every_hyperparameter(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in ("mars_adamw", "--mars_gamma", "--lr_1d", "learning_rate / 2, as in the paper", "--is_approx"):
        assert words in text


def config_file(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_wins_over_the_file(tmp_path):
    path = config_file(tmp_path, "output_dir: somewhere\nlearning_rate: 6e-3\nmars_gamma: 0.1\nlr_1d: null\n")
    (args,) = parse_config([MARSTrainingArguments], ["--config", path, "--mars_gamma", "0.2"])
    assert (args.learning_rate, args.mars_gamma, args.lr_1d, args.output_dir) == (6e-3, 0.2, None, "somewhere")
    (args,) = parse_config([MARSTrainingArguments], ["--lr_1d=0.5"], default_config=path)
    assert (args.lr_1d, args.mars_gamma) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("output_dir: x\nlerning_rate: 1\n", [], "unknown key 'lerning_rate', did you mean 'learning_rate'"),
        ("output_dir: x\n", ["--mars_gama", "1"], "unknown argument '--mars_gama', did you mean '--mars_gamma'"),
        ("output_dir: x\n", ["--mars-gama=1"], "did you mean '--mars_gamma'"),
        ("- a list\n", [], "must hold `key: value` lines"),
        ("a: [\n", [], "cannot be read"),
        ("output_dir: x\n5: z\n", [], "unknown key 5"),
        ("output_dir: x\nmars_gamma: [1, 2]\n", [], "unknown argument '2'"),
        ("output_dir: x\nmax_steps: 1.5\n", [], "max_steps"),
        ("output_dir: x\nlearning_rate: true\n", [], "learning_rate"),
        ("output_dir: x\nmars_decay: autors\n", [], "mars_decay"),
        ("output_dir: x\n", ["--learning_rate", "much"], "learning_rate"),
        ("output_dir: x\n", ["--lr_scheduler_kwargs", "{min"], "Expecting"),
    ],
)
def test_unknown_names_fail_with_the_nearest(tmp_path, text, options, message):
    path = config_file(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        parse_config([MARSTrainingArguments], ["--config", path, *options])


def test_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        parse_config([MARSTrainingArguments], ["--config", "nowhere.yaml"])
