"""What parameters of many architectures are taken for, and what each rule then does with them."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from mars_hf import MARS, mars_param_groups
from mars_hf.optim.roles import roles

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}

# The last part or two of names; * stands for every other parameter of two dimensions and more.
ARCHITECTURES = {
    "gpt2": {"embedding": "wte wpe", "transposed": "*"},
    "llama": {"embedding": "embed_tokens", "matrix": "*"},
    "qwen2": {"embedding": "embed_tokens", "matrix": "*"},
    "qwen3": {"embedding": "embed_tokens", "matrix": "*"},
    "mistral": {"embedding": "embed_tokens", "matrix": "*"},
    "gemma": {"embedding": "embed_tokens", "matrix": "*"},
    "gemma3_text": {"embedding": "embed_tokens", "matrix": "*"},
    "gpt_neox": {"embedding": "embed_in", "matrix": "*"},
    "phi": {"embedding": "embed_tokens", "matrix": "*"},
    "opt": {"embedding": "embed_tokens embed_positions", "matrix": "*"},
    "bloom": {"embedding": "word_embeddings", "matrix": "*"},
    "mixtral": {"embedding": "embed_tokens", "stack": "gate_up_proj down_proj", "matrix": "*"},
    "qwen3_moe": {"embedding": "embed_tokens", "stack": "gate_up_proj down_proj", "matrix": "*"},
    "deepseek_v3": {"embedding": "embed_tokens", "stack": "experts.gate_up_proj experts.down_proj", "matrix": "*"},
    "gpt_oss": {
        "embedding": "embed_tokens",
        "transposed stack": "gate_up_proj down_proj",
        "vector": "gate_up_proj_bias down_proj_bias",
        "matrix": "*",
    },
    "rwkv": {"embedding": "embeddings", "vector": "time_mix_key time_mix_value time_mix_receptance", "matrix": "*"},
    "mamba": {"embedding": "embeddings", "matrix": "*"},
}


def causal_model(kind, tied):
    known = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{name: size for name, size in SIZES.items() if hasattr(known, name)})
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def kind_of(role):
    shape = f"{'transposed ' * role.transposed}{'stack ' * role.stacked}".strip()
    return shape if role.kind == "matrix" and shape else role.kind


def expected_kind(name, table):
    name = name.removesuffix(".weight")
    return next(
        kind for kind, parts in table.items() if parts == "*" or name.endswith(tuple(f".{p}" for p in parts.split()))
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_parameter_of_an_architecture(kind):
    for tied in (True, False):
        model = causal_model(kind, tied)
        by_id = roles(model)
        head = model.get_output_embeddings().weight
        for name, p in model.named_parameters():
            found = kind_of(by_id[id(p)])
            if p.ndim < 2:
                assert found == "vector", f"{name}: {found}"
            elif not tied and p is head:
                assert found == "head", f"{name}: {found}"
            else:
                assert found == expected_kind(name, ARCHITECTURES[kind]), f"{name} {tuple(p.shape)}: {found}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize(
    "mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight"]
)
def test_which_rule_and_decay_each_kind_gets(mars_type, kind, tied):
    model = causal_model(kind, tied)
    by_id = roles(model)
    groups = mars_param_groups(model, lr=6e-3, mars_type=mars_type, weight_decay=0.01, weight_decay_1d=0.1)
    MARS(groups, mars_type=mars_type)
    orthogonal = mars_type in ("mars-shampoo", "mars-m", "muon", "moonlight")
    outside = mars_type in ("mars-m", "muon", "moonlight")
    for group in groups:
        for p in group["params"]:
            role = by_id[id(p)]
            adamw = role.kind == "vector" or (outside and role.kind in ("embedding", "head"))
            assert group["rule"] == ("adamw" if adamw else mars_type), role
            assert group["weight_decay"] == (0.1 if adamw else 0.0 if role.kind == "embedding" else 0.01), role
            assert group["stacked"] is (orthogonal and role.stacked and not adamw), role
            assert group["transposed"] is (orthogonal and role.transposed and not adamw), role
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def suffixes(model, kind):
    by_id = roles(model)
    names = (name for name, p in model.named_parameters() if by_id[id(p)].kind == kind and p.ndim > 1)
    return {re.sub(r"\.\d+\.", ".", name) for name in names}


def test_classifiers_are_heads_and_position_embeddings_no_matrices():
    vit = ViTForImageClassification(ViTConfig(**VISION, image_size=8, patch_size=4))
    assert suffixes(vit, "head") == {"classifier.weight"}
    assert suffixes(vit, "embedding") == {"vit.embeddings.position_embeddings"}
    assert suffixes(vit, "vector") == {"vit.embeddings.cls_token"}
    llama = LlamaForSequenceClassification(LlamaConfig(vocab_size=8, **VISION))
    assert suffixes(llama, "head") == {"score.weight"}


class GainPerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


class PerHeadNorm(GainPerHead):
    pass


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return nn.utils.weight_norm(module)


def test_modules_that_are_no_models():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv1d(6, 1, 3),
            "depthwise": nn.Conv1d(6, 6, 3, groups=6),
            "normed": nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 4, 3), dim=2),
            "old_normed": old_weight_norm(nn.Linear(6, 4)),
            "one": nn.Linear(6, 1),
            "gain": PerHeadNorm(),
            "raw": GainPerHead(),
            "layer_norm": nn.LayerNorm((4, 8)),
        }
    )
    by_id = roles(model)
    found = {name: by_id[id(p)] for name, p in model.named_parameters() if p.ndim > 1}
    original = "normed.parametrizations.weight.original"
    vectors = {"old_normed.weight_g", "gain.weight", "layer_norm.weight", "layer_norm.bias", f"{original}0"}
    assert {name for name, role in found.items() if role.kind == "vector"} == vectors
    assert not any(role.stacked or role.transposed for role in found.values()), "a kernel is one matrix"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo", "muon", "moonlight"])
def test_a_stack_is_updated_as_its_matrices_are(rule, transposed):
    """Experts in one tensor train as they would in separate ones (the clip of c, which sees all of them, is off)."""
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 4, 10))
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings = {"lr": 0.1, "mars_type": rule, "clip_c": None, "weight_decay": 0.1, "ns_dtype": torch.float32}
    together = MARS([{"params": [stack], "rule": rule, "stacked": True, "transposed": transposed}], **settings)
    apart = MARS([{"params": singles, "rule": rule, "transposed": transposed}], **settings)
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for single, grad in zip(singles, stack.grad):
            single.grad = grad.clone()
        together.step()
        apart.step()
    assert_close(stack.detach(), torch.stack([p.detach() for p in singles]), atol=1e-6, rtol=0, msg=lambda m: m)


def test_a_checkpoint_from_before_stacks_loads():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = MARS([{"params": [weight], "rule": "mars-m"}], mars_type="mars-m")
    state = optimizer.state_dict()
    del state["param_groups"][0]["stacked"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["stacked"] is False


@pytest.mark.parametrize("shape", [(6, 8), (2, 6, 8, 3)])
def test_a_stack_has_three_dimensions(shape):
    weight = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=r"parameter 0 \(shape .*\) is no stack of matrices.* stacked=False"):
        MARS([{"params": [weight], "rule": "mars-m", "stacked": True}], mars_type="mars-m")
