"""Which parameter gets which rule, learning rate and weight decay."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mars_hf import MARS, mars_param_groups


def gpt2(**kwargs):
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2, **kwargs))


def routing(model, **kwargs):
    """name -> (rule, lr, weight decay, betas, transposed)"""
    groups = mars_param_groups(model, lr=6e-3, weight_decay=0.01, **kwargs)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (g["rule"], g["lr"], g["weight_decay"], g["betas"], g["transposed"])
        for g in groups
        for p in g["params"]
    }


def test_mars_adamw_as_in_the_authors_gpt2_runs():
    routes = routing(gpt2(), lr_1d=3e-3)
    assert routes["transformer.wte.weight"] == ("mars-adamw", 6e-3, 0.0, (0.95, 0.99), False)
    assert routes["transformer.wpe.weight"] == ("mars-adamw", 6e-3, 0.0, (0.95, 0.99), False)
    assert routes["transformer.h.0.attn.c_attn.weight"] == ("mars-adamw", 6e-3, 0.01, (0.95, 0.99), False)
    assert routes["transformer.h.0.ln_1.weight"] == ("adamw", 3e-3, 0.1, (0.9, 0.95), False)


@pytest.mark.parametrize("mars_type", ["mars-m", "moonlight"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrix_rules_leave_embeddings_and_head_to_adamw(mars_type, tied):
    routes = routing(gpt2(tie_word_embeddings=tied), mars_type=mars_type)
    assert routes["transformer.h.1.mlp.c_fc.weight"] == (mars_type, 6e-3, 0.01, (0.95, 0.99), True)
    outside = ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"]
    for name in outside + ["lm_head.weight"] * (not tied):
        assert routes[name] == ("adamw", 6e-3, 0.01, (0.9, 0.95), False)
    assert ("lm_head.weight" in routes) != tied


def test_shampoo_keeps_embeddings_and_knows_conv1d():
    routes = routing(gpt2(), mars_type="mars-shampoo")
    assert routes["transformer.wte.weight"][0::4] == ("mars-shampoo", False)
    assert routes["transformer.h.0.attn.c_attn.weight"][0::4] == ("mars-shampoo", True)


def test_baseline_adamw_decays_linear_weights_only():
    routes = routing(gpt2(), mars_type="adamw", betas=(0.9, 0.95))
    decays = {name: route[2] for name, route in routes.items()}
    assert {name for name, decay in decays.items() if decay} == {
        f"transformer.h.{i}.{layer}.weight"
        for i in (0, 1)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_decay_names_decide_for_every_parameter():
    model = gpt2()
    names = [name for name, _ in model.named_parameters() if "bias" not in name and "ln_" not in name]
    decays = {name: route[2] for name, route in routing(model, decay_names=names).items()}
    assert decays == {name: 0.01 if name in names else 0.0 for name in decays}
    explicit = routing(model, decay_names=names, weight_decay_1d=0.3)
    assert explicit["transformer.ln_f.weight"][2] == 0.3
    assert explicit["transformer.wte.weight"][2] == 0.01


def test_llama_linear_weights_are_not_transposed_and_the_head_is_known():
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    routes = routing(LlamaForCausalLM(config), mars_type="mars-m")
    assert routes["lm_head.weight"][0] == routes["model.embed_tokens.weight"][0] == "adamw"
    assert routes["model.layers.0.mlp.up_proj.weight"][0::4] == ("mars-m", False)


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_head_is_known_inside_a_wrapper(name):
    wrapper = nn.Module()
    wrapper.add_module(name, gpt2(tie_word_embeddings=False))
    assert routing(wrapper, mars_type="mars-m")[f"{name}.lm_head.weight"][0] == "adamw"


def test_embedding_bags_are_embeddings():
    model = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 4))
    assert routing(model, mars_type="mars-m")["0.weight"][0] == "adamw"
    assert routing(model)["0.weight"][2] == 0.0


def test_head_of_a_plain_module_can_be_named():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    assert routing(model, mars_type="mars-m")["2.weight"][0] == "mars-m"
    assert routing(model, mars_type="mars-m", head=model[2])["2.weight"][0] == "adamw"


@pytest.mark.parametrize(
    "mars_type", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "adamw", "muon", "moonlight"]
)
@pytest.mark.parametrize("decay_names", [None, ["transformer.wte.weight"]])
def test_every_trainable_parameter_is_in_exactly_one_group(mars_type, decay_names):
    model = gpt2()
    model.transformer.h[0].requires_grad_(False)
    groups = mars_param_groups(model, lr=1e-3, mars_type=mars_type, decay_names=decay_names)
    grouped = [id(p) for g in groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    optimizer = MARS(groups, mars_type=mars_type)
    assert optimizer.param_groups[0]["rule"] == mars_type
    for group, built in zip(groups, optimizer.param_groups):
        assert {key: built[key] for key in group if key != "params"} == {
            k: v for k, v in group.items() if k != "params"
        }
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()


def test_optimize_1d_gives_vectors_the_rule():
    routes = routing(gpt2(), optimize_1d=True)
    assert {route[0] for route in routes.values()} == {"mars-adamw"}
    assert routes["transformer.ln_f.weight"][1:3] == (6e-3, 0.01)


def test_unknown_rule_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'moonlight'"):
        mars_param_groups(gpt2(), lr=1e-3, mars_type="moonligt")
