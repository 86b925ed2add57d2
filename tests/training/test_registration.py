"""register(): --optim mars with stock TrainingArguments and Trainer."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

import mars_hf
from mars_hf import MARS
from mars_hf.training.arguments import OPTIM_NAMES

BEFORE = {name.value: _OPTIMIZER_HANDLERS.get(name) for name in OptimizerNames if name.value not in OPTIM_NAMES}


@pytest.fixture(autouse=True)
def registered():
    mars_hf.register()
    mars_hf.register()


def stock(tmp_path, *options):
    options = ["--output_dir", str(tmp_path), "--report_to", "none", *options]
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(options)[0]


def trained(args):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(17, (8, 8))]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    return trainer


def test_idempotent_and_other_names_untouched():
    names = [name.value for name in OptimizerNames]
    assert len(names) == len(set(names)) == len(BEFORE) + len(OPTIM_NAMES)
    for value, handler in BEFORE.items():
        assert _OPTIMIZER_HANDLERS.get(OptimizerNames(value)) is handler


@pytest.mark.parametrize("name", OPTIM_NAMES)
def test_stock_trainer_trains_with_mars(tmp_path, name):
    options = ["--optim", name, "--optim_args", "gamma=0.05,lr_1d=3e-3", "--max_steps", "2", "--use_cpu"]
    trainer = trained(stock(tmp_path, *options, "--learning_rate", "1e-2", "--weight_decay", "0.1"))
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is MARS
    rule = OPTIM_NAMES[name] or "mars-adamw"
    assert optimizer.param_groups[0]["rule"] == rule
    assert optimizer.param_groups[0]["gamma"] == 0.05
    assert {g["initial_lr"] for g in optimizer.param_groups if g["rule"] == "adamw"} <= {3e-3}
    # The Trainer's decay groups: no bias and no norm decays, embeddings do.
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    decays = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n for n, decay in decays.items() if decay == 0} == {n for n in decays if "bias" in n or "ln_" in n}
    args = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert args.optim == name


def test_transposed_conv1d_weights_are_known(tmp_path):
    optimizer = trained(stock(tmp_path, "--optim", "mars_m", "--max_steps", "1", "--use_cpu")).optimizer.optimizer
    assert [g["transposed"] for g in optimizer.param_groups if g["rule"] == "mars-m"] == [True]


def test_serialisation(tmp_path):
    args = stock(tmp_path, "--optim", "mars")
    assert args.to_dict()["optim"] == "mars"
    assert json.loads(args.to_json_string())["optim"] == "mars"
    assert copy.deepcopy(args).optim == pickle.loads(pickle.dumps(args)).optim == "mars"
    assert TrainingArguments(output_dir=str(tmp_path), optim="mars_m").optim is OptimizerNames("mars_m")


def test_saved_arguments_load_where_mars_hf_is_missing(tmp_path):
    torch.save(stock(tmp_path, "--optim", "mars"), tmp_path / "training_args.bin")
    code = (
        "import sys, torch; sys.modules['mars_hf'] = None; "
        f"args = torch.load({str(tmp_path / 'training_args.bin')!r}, weights_only=False); "
        "assert args.optim == 'mars' and type(args.optim) is str, repr(args.optim)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_and_misspelt_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        stock(tmp_path, "--help")
    assert "mars_shampoo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        stock(tmp_path, "--optim", "mras")
    assert "mars" in capsys.readouterr().err
    with pytest.raises(ValueError, match="mars_m"):
        TrainingArguments(output_dir=str(tmp_path), optim="mras")
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        trained(stock(tmp_path, "--optim", "mars", "--optim_args", "gama=1", "--use_cpu"))


def test_exact_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is_approx=False"):
        trained(stock(tmp_path, "--optim", "mars", "--optim_args", "is_approx=False", "--use_cpu"))


def test_without_register_the_stock_names_are_unknown():
    code = (
        "import mars_hf, mars_hf.training; from transformers import TrainingArguments\n"
        "try: TrainingArguments(output_dir='unused', optim='mars')\n"
        "except ValueError: pass\n"
        "else: raise SystemExit('known before register()')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
