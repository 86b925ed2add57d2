"""A nanoGPT-style checkpoint, made by hand, imported: logits, the next step, what is refused."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.data import train_tokenizer
from mars_hf.models import build_model, load_config
from mars_hf.training.config import parse_config

# Eleven layers: sorted by name, the last one comes third.
SHAPE = {"n_layer": 11, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 96}
STEP, MICRO_BATCHES, ROWS = 7, 2, 2
# As train_mars.py leaves them in a checkpoint.
CONFIG = {
    **{"learning_rate": 6e-3, "min_lr": 6e-4, "warmup_iters": 2, "lr_decay_iters": 20, "max_iters": 20},
    **{"lr_1d": 3e-3, "grad_clip": 0.5, "batch_size": ROWS, "gradient_accumulation_steps": MICRO_BATCHES},
    **{"schedule": "cosine", "decay_lr": True, "is_approx": True, "dtype": "bfloat16", "compile": True},
}


class Block(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = nn.Module()
        self.attn.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.attn.c_proj = nn.Linear(width, width, bias=bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.mlp.c_proj = nn.Linear(4 * width, width, bias=bias)


class Model(nn.Module):
    """GPT-2 as nanoGPT names and stores it; `by_layer`: attention divided by the number of the layer."""

    def __init__(self, bias=False, by_layer=True, tanh=True):
        super().__init__()
        torch.manual_seed(1)
        self.by_layer, self.tanh = by_layer, tanh
        width = SHAPE["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(SHAPE["vocab_size"], width),
                "wpe": nn.Embedding(SHAPE["block_size"], width),
                "h": nn.ModuleList([Block(width, bias) for _ in range(SHAPE["n_layer"])]),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, SHAPE["vocab_size"], bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for p in self.parameters():
            nn.init.normal_(p, mean=float(p.ndim == 1), std=0.3)

    def forward(self, ids):
        batch, time = ids.shape
        x = self.transformer.wte(ids) + self.transformer.wpe.weight[:time]
        for i, block in enumerate(self.transformer.h):
            q, k, v = (
                part.view(batch, time, SHAPE["n_head"], -1).transpose(1, 2)
                for part in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1)
            )
            scale = 1 / math.sqrt(q.shape[-1]) / (i + 1 if self.by_layer else 1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            x = x + block.attn.c_proj(mixed.transpose(1, 2).flatten(2))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate="tanh" if self.tanh else "none"))
        return self.lm_head(self.transformer.ln_f(x))


def checkpoint(model, prefix="", **more):
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    # Where attention is spelled out, the causal mask is saved too.
    weights[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 6, 6).tril()
    args = {**SHAPE, "bias": "transformer.ln_f.bias" in model.state_dict(), "dropout": 0.0}
    if model.by_layer:
        args["scale_attn_by_inverse_layer_idx"] = True
    loss = torch.tensor(3.2)
    return {"model": weights, "model_args": args, "iter_num": STEP, "best_val_loss": loss, "config": CONFIG, **more}


@pytest.fixture
def importer(root, tmp_path, monkeypatch, capsys):
    """Saves a checkpoint (or takes a file), imports it, and returns the folder and what was printed."""
    monkeypatch.syspath_prepend(str(root / "recipes"))
    import import_checkpoint

    def run(saved, *options, output="imported"):
        path = tmp_path / "ckpt.pt"
        if not isinstance(saved, str):
            torch.save(saved, path)
        command = ["--checkpoint", str(path if not isinstance(saved, str) else saved)]
        monkeypatch.setattr(
            sys, "argv", ["import_checkpoint.py", *command, "--output_dir", str(tmp_path / output), *options]
        )
        import_checkpoint.main()
        return SimpleNamespace(folder=tmp_path / output, printed=capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("settings", "prefix", "options"),
    [
        ({}, "_orig_mod.", []),
        ({"bias": True}, "module._orig_mod.", []),
        ({"by_layer": False, "tanh": False}, "", []),
        ({"by_layer": False}, "", ["--activation_function", "gelu_pytorch_tanh"]),
    ],
    ids=["authors", "bias", "nanogpt", "older nanogpt"],
)
def test_logits_agree(settings, prefix, options, importer):
    model = Model(**settings).eval()
    # AdamW of nanoGPT: matrices, then vectors.
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) is two] for two in (True, False))
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    done = importer(checkpoint(model, prefix, optimizer=adamw.state_dict()), *options)
    loaded = AutoModelForCausalLM.from_pretrained(done.folder)
    ids = torch.randint(SHAPE["vocab_size"], (3, 6))
    assert_close(loaded(ids).logits, model(ids), atol=2e-5, rtol=0, msg=lambda m: f"logits: {m}")
    biases = [p for name, p in loaded.named_parameters() if name.endswith(".bias")]
    assert any(p.any() for p in biases) is settings.get("bias", False), "biases that the checkpoint has not must be 0"
    assert not list(done.folder.glob("*optimizer*")), "AdamW's state is not that of MARS"
    assert "weights only, without optimizer: it was written by another optimizer than MARS" in done.printed


def grouped(model, kind):
    """The numbers of the parameters in the saved optimizer: names, in order, for each group."""
    weights = dict(model.named_parameters())
    linear = [name for name, p in weights.items() if p.ndim == 2 and "wte" not in name and "wpe" not in name]
    matrices = [name for name, p in weights.items() if p.ndim == 2]
    rest = [name for name in weights if name not in linear]
    return {
        "authors": [sorted(linear), sorted(rest)],
        "nanogpt": [matrices, [name for name in weights if name not in matrices]],
        "mars-m": [linear + rest],
    }[kind]


def saved_optimizer(model, mars_type, kind):
    """A state as the authors' optimizers save it after STEP steps, and the names of its numbers."""
    groups, weights = grouped(model, kind), dict(model.named_parameters())
    names = [name for group in groups for name in group]
    state = {}
    for i, name in enumerate(names):
        p = weights[name]
        first, second, last = torch.randn_like(p) * 0.01, torch.rand_like(p) * 1e-3, torch.randn_like(p) * 0.01
        if mars_type != "mars-m":
            state[i] = {"step": STEP, "exp_avg": first, "exp_avg_sq": second, "last_grad": last}
        elif name in groups[0][: 4 * SHAPE["n_layer"]]:
            state[i] = {"use_muon": True, "last_grad": last, "momentum_buffer": first}
        else:
            state[i] = {"use_muon": False, "step": STEP, "moment1": first, "moment2": second}
    numbers = iter(range(len(names)))
    shared = {"lr": 1e-3, "gamma": 0.025}
    if mars_type == "mars-m":
        shared |= {"wd": 0.01, "momentum": 0.95, "ns_steps": 5, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
        shared |= {"mars_factor": 0.475, "clip_c": False, "is_approx": True}
        decays = [{}]
    else:
        shared |= {"betas": (0.95, 0.99), "eps": 1e-8, "amsgrad": False, "mars_type": mars_type}
        shared |= {"optimize_1d": False, "weight_decay_1d": 0.1}
        decays = [{"weight_decay": 0.01}, {"weight_decay": 0.0}]
    param_groups = [
        {**shared, **decay, "params": [next(numbers) for _ in group]} for group, decay in zip(groups, decays)
    ]
    return {"state": state, "param_groups": param_groups}, names


def newton_schulz(m):
    x = m / (m.norm() + 1e-7)
    x = x.T if m.shape[0] > m.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def next_parameters(model, saved, names, mars_type, gradients):
    """One step of the authors' rule, written out, on gradients of added-up losses after their clip."""
    lr = 6e-4 + 0.5 * (1 + math.cos(math.pi * (STEP - 2) / 18)) * (6e-3 - 6e-4)
    weights, step, is_m = dict(model.named_parameters()), STEP + 1, mars_type == "mars-m"
    decayed = {i for group in saved["param_groups"] for i in group["params"] if group.get("weight_decay") or is_m}
    result = {}
    for i, name in enumerate(names):
        p, g, state = weights[name].detach(), gradients[name], saved["state"][i]
        if state["use_muon"] if is_m else p.ndim == 2:
            c = g + 0.025 * 0.95 / 0.05 * (g - state["last_grad"])
            c = c / max(1.0, c.norm())
            m = 0.95 * state["momentum_buffer" if is_m else "exp_avg"] + 0.05 * c
            if is_m:
                result[name] = p * (1 - lr * 0.01) - lr * 0.2 * max(p.shape) ** 0.5 * newton_schulz(m)
                continue
            v = 0.99 * state["exp_avg_sq"] + 0.01 * c**2
            rate, decay, beta1, beta2 = lr, 0.01 if i in decayed else 0.0, 0.95, 0.99
        else:
            first, second = ("moment1", "moment2") if is_m else ("exp_avg", "exp_avg_sq")
            m, v = 0.9 * state[first] + 0.1 * g, 0.95 * state[second] + 0.05 * g**2
            rate, decay, beta1, beta2 = (lr, 0.01, 0.9, 0.95) if is_m else (lr / 2, 0.1, 0.9, 0.95)
        update = m / (1 - beta1**step) / (v.sqrt() / math.sqrt(1 - beta2**step) + 1e-8)
        result[name] = p - rate * (decay * p + update)
    return result


@pytest.mark.parametrize(
    ("mars_type", "kind"), [("mars-adamw", "authors"), ("mars-adamw", "nanogpt"), ("mars-m", "mars-m")]
)
def test_the_next_step_agrees(mars_type, kind, importer, tmp_path):
    model = Model()
    saved, names = saved_optimizer(model, mars_type, kind)
    done = importer(checkpoint(model, "_orig_mod.", optimizer=saved))
    assert f"after {STEP} steps, the losses of {MICRO_BATCHES} micro-batches averaged" in done.printed
    folder = done.folder / f"checkpoint-{STEP}"
    settings = yaml.safe_load((done.folder / "resume.yaml").read_text())
    assert settings["mars_decay"] == ("trainer" if kind == "nanogpt" else "authors"), "whether embeddings decay"

    rows = torch.randint(SHAPE["vocab_size"], (MICRO_BATCHES * ROWS, 6))
    # The Trainer divides the sum over the predicted tokens by the number of all; the authors add up the micro-batches.
    loss = F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / rows.numel()
    (MICRO_BATCHES * loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CONFIG["grad_clip"])
    assert norm > CONFIG["grad_clip"], "the clip of the gradients is not tested"
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = next_parameters(model, saved, names, mars_type, gradients)

    # In bfloat16 a matrix and its transpose round apart.
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    for group in optimizer["param_groups"]:
        group["ns_dtype"] = "float32"
    torch.save(optimizer, folder / "optimizer.pt")
    known = {name: settings[name] for name in settings.keys() & set(MARSTrainingArguments.__dataclass_fields__)}
    args = MARSTrainingArguments(**{**known, "output_dir": str(tmp_path / "resumed")})
    args.max_steps, planned = STEP + 1, args.max_steps
    assert planned == CONFIG["lr_decay_iters"]
    resumed = build_model(load_config(str(folder)), bias=settings["bias"])
    trainer = MARSTrainer(resumed, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.create_optimizer_and_scheduler(planned)
    trainer.train(resume_from_checkpoint=settings["resume_from_checkpoint"])
    assert trainer.state.global_step == STEP + 1
    after = dict(resumed.named_parameters())
    for name, value in expected.items():
        stored = after[name].T if after[name].shape != value.shape or "c_" in name else after[name]
        assert_close(stored, value, atol=2e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_the_recipe_takes_what_was_written(root, importer, tmp_path):
    texts = ["It is a truth universally acknowledged, that a single man must be in want of a wife."] * 20
    train_tokenizer(texts, 300).save_pretrained(tmp_path / "tokenizer")
    saved, _ = saved_optimizer(Model(), "mars-adamw", "authors")
    whole = checkpoint(Model(), optimizer=saved)
    with pytest.raises(ValueError, match="has 300 tokens, the model 96: give the one it was trained with"):
        importer(whole, "--tokenizer_name", str(tmp_path / "tokenizer"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt.pt", "tokenizer"], (
        "something half-written is left"
    )

    done = importer(whole)
    monkey = [str(root / "recipes")]
    sys.path[:0] = monkey
    import pretrain_gpt2

    sys.path.remove(monkey[0])
    types = [pretrain_gpt2.DataArguments, pretrain_gpt2.ModelArguments, pretrain_gpt2.EvaluationArguments]
    *parts, args = parse_config([*types, MARSTrainingArguments], ["--config", str(done.folder / "resume.yaml")])
    assert args.resume_from_checkpoint == str(done.folder / f"checkpoint-{STEP}")
    assert (parts[0].block_size, parts[1].bias) == (6, False)
    assert json.loads(parts[1].model_overrides) == {"vocab_size": 96}
    assert (args.mars_clip_c, args.max_grad_norm, args.adam_epsilon) == (0.5, 0.25, 5e-9)


def test_tokenizer_is_saved_beside(importer, tmp_path):
    tokenizer = train_tokenizer(["a man, a wife, a man"] * 9, 260)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = Model()
    model.lm_head.weight.data = torch.randn(320, 8)  # padded
    model.transformer.wte.weight = model.lm_head.weight
    saved = checkpoint(model)
    saved["model_args"]["vocab_size"] = 320
    done = importer(saved, "--tokenizer_name", str(tmp_path / "tokenizer"))
    assert "the checkpoint holds no optimizer" in done.printed
    assert AutoTokenizer.from_pretrained(done.folder).get_vocab() == tokenizer.get_vocab()
    loaded = AutoModelForCausalLM.from_pretrained(done.folder)
    assert (loaded.config.vocab_size, loaded.config.eos_token_id) == (320, tokenizer.eos_token_id)


class Custom:
    pass


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda c: {**c, "config": Custom()}, [], "Custom, which only an unsafe load can read: .* torch.save$"),
        (lambda c: {"weights": c["model"]}, [], "has no model and no model_args: it is not one of a nanoGPT-style run"),
        (
            lambda c: {**c, "model_args": {"n_layer": 11}},
            [],
            "model_args have no block_size, n_embd, n_head, vocab_size",
        ),
        (
            lambda c: {**c, "model": {**c["model"], "rotary": torch.ones(2)}},
            [],
            r"weight 'rotary' has the shape \(2,\)",
        ),
        (lambda c: {**c, "model_args": {**c["model_args"], "n_embd": 16}}, [], "a GPT-2 of its model_args"),
        (lambda c: {**c, "config": {}}, [], "its config has no learning_rate, .*: pass --weights_only true"),
        (lambda c: {**c, "config": {**CONFIG, "schedule": "exp"}}, [], "schedule='exp' is not the Trainer's"),
        (lambda c: {**c, "model_args": None}, [], "has no model_args: it is not one of"),
        (lambda c: {**c, "model": [torch.ones(1)]}, [], "has no model: it is not one of"),
        (lambda c: {k: v for k, v in c.items() if k != "iter_num"}, [], "it has no iter_num"),
        (
            lambda c: {**c, "optimizer": {**c["optimizer"], "state": {}}},
            [],
            r"no state of 69 parameters \(.*: pass --weights_only true",
        ),
        (lambda c: c, ["--activation_function", "relu"], "activation_function='relu' must be"),
        (lambda c: c, ["--micro_batches", "0"], "micro_batches=0 must be 1 or more"),
        (lambda c: c, ["--tokenizer_name", "nowhere/at/all"], "tokenizer_name='nowhere/at/all' cannot be loaded"),
    ],
    ids=range(14),
)
def test_bad_input_is_one_line_and_writes_nothing(change, options, message, importer, tmp_path):
    model = Model()
    saved, _ = saved_optimizer(model, "mars-adamw", "authors")
    with pytest.raises(ValueError, match=message) as raised:
        importer(change(checkpoint(model, optimizer=saved)), *options)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"], "something half-written is left"


def test_files_that_are_no_checkpoint(importer, tmp_path):
    with pytest.raises(ValueError, match=r"is not a file: give the ckpt\.pt of a run"):
        importer(str(tmp_path / "none.pt"))
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pt.* is no file of torch\.save") as raised:
        importer(str(tmp_path / "text.pt"))
    assert "\n" not in str(raised.value)
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "mine").write_text("")
    with pytest.raises(ValueError, match="holds something already"):
        importer(checkpoint(Model()))
