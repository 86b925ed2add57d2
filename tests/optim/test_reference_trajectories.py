"""The trajectories of the authors' code on recorded gradients, every rule, approx and exact."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mars_hf import MARS

FILES = sorted((Path(__file__).parents[1] / "data" / "reference_trajectories").glob("*.safetensors"))
MATRICES = {"wide", "tall", "square"}
MARS_ARGUMENTS = (
    *("lr", "betas", "gamma", "weight_decay", "mars_type"),
    *("lr_1d", "betas_1d", "weight_decay_1d", "amsgrad", "optimize_1d"),
)

# Both sides are float32: the same rules in float64 are up to 3e-7 away from the recorded parameters.
ROUNDING = 5e-7
# The authors' AdamW inside MARS-M and Moonlight does not correct the bias of eps.
EPS_NOT_CORRECTED = 2e-5


def build(config: dict, params: dict[str, torch.nn.Parameter], fused: bool | None) -> MARS:
    is_approx = not config["exact"]
    if "mars_type" in config:
        arguments = {name: config[name] for name in MARS_ARGUMENTS if name in config}
        return MARS(params.values(), is_approx=is_approx, ns_dtype=torch.float32, fused=fused, **arguments)
    rule = "moonlight" if "Moonlight" in config["algorithm"] else "mars-m"
    memory_efficient = "no last_grad" in config["algorithm"]
    return MARS(
        [
            {"params": [p for name, p in params.items() if name in MATRICES], "rule": rule},
            {"params": [p for name, p in params.items() if name not in MATRICES], "rule": "adamw"},
        ],
        lr=config["lr"],
        betas=(config["momentum"], 0.99),
        betas_1d=config["adamw_betas"],
        weight_decay=config["wd"],
        gamma=config.get("gamma", 0.025),
        is_approx=is_approx,
        mars_type=rule,
        clip_c=None if memory_efficient else 1.0,
        memory_efficient=memory_efficient,
        ns_dtype=torch.float32,
        fused=fused,
    )


def test_every_recorded_case_is_here():
    assert len(FILES) == 13


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trajectory(path, fused):
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        recorded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if fused and config.get("amsgrad"):
        pytest.skip("fused=True refuses amsgrad")
    names = [key.removeprefix("param0.") for key in recorded if key.startswith("param0.")]
    params = {name: torch.nn.Parameter(recorded[f"param0.{name}"].clone()) for name in names}
    optimizer = build(config, params, fused)
    adamw_in_muon = "mars_type" not in config
    peaks = [group["lr"] for group in optimizer.param_groups]
    steps = config["steps"]
    for t in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks):
            factor = 0.1 + 0.45 * (1 + math.cos(math.pi * t / steps)) if config["schedule"] == "cosine" else 1.0
            group["lr"] = peak * factor
        if config["exact"] and t + 1 < steps:
            for name, p in params.items():
                p.grad = recorded[f"grad_at_previous_params.{name}"][t + 1].clone()
            optimizer.update_previous_grad()
        for name, p in params.items():
            p.grad = recorded[f"grad.{name}"][t].clone()
        optimizer.step(bs=480 * 1024)
        optimizer.zero_grad(set_to_none=True)
        optimizer.update_last_grad()
        for name, p in params.items():
            tolerance = EPS_NOT_CORRECTED if adamw_in_muon and name not in MATRICES else ROUNDING
            torch.testing.assert_close(
                p.data,
                recorded[f"param.{name}"][t],
                rtol=0,
                atol=tolerance,
                msg=lambda m, name=name, t=t: f"{path.stem}: {name} after step {t}: {m}",
            )
