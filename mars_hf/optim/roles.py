"""What a parameter is to its model, judged by the module that owns it."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from mars_hf.optim.sharding import whole_shape

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


class Role(NamedTuple):
    """What a parameter is.

    Args:
        kind: "vector", "matrix", "embedding" or "head" (the output embeddings, tied or not).
        transposed: whether it is stored (in_features, out_features).
        stacked: whether it is a stack of matrices along its first dimension.
    """

    kind: str
    transposed: bool = False
    stacked: bool = False


def embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The embedding modules of a model and their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, EMBEDDINGS))


def roles(model: nn.Module, head: nn.Module | None = None) -> dict[int, Role]:
    """The role of each parameter, by its id.

    Fewer than two dimensions make a vector, and so do the gains of norms and what is named bias or weight_g (of the old
    `weight_norm`), whatever their shape (gains and biases for each attention head or expert). What no linear or
    convolution module owns is told by its shape. Dimensions of size 1 do not count, so class, mask and register tokens
    are vectors; a first dimension of size 1 is a batch to broadcast over, so that what is left are position embeddings;
    any other three dimensions are a stack of matrices (experts). Two dimensions are a matrix, which is also what
    relative position tables, latent queries and Mamba's A_log are taken for: in groups of your own give them the rule
    "adamw". Llama 4 does not say that its experts are transposed, which only mars-shampoo and muon would have to know.

    Args:
        model: only read.
        head: the output head; None: see `output_head`.
    """
    heads = {id(p) for p in head.parameters()} if head is not None else output_head(model)
    found: dict[int, Role] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            role = Role("embedding") if isinstance(module, EMBEDDINGS) else _role(module, name, whole_shape(p))
            if id(p) in heads and role.kind == "matrix":
                role = role._replace(kind="head")
            # A tied weight is an embedding first of all.
            if id(p) not in found or role.kind == "embedding":
                found[id(p)] = role
    return found


def _role(module: nn.Module, name: str, shape: tuple[int, ...]) -> Role:
    is_norm = isinstance(module, NORMS) or type(module).__name__.endswith("Norm")
    if len(shape) < 2 or is_norm or name.endswith(("bias", "weight_g")):
        return Role("vector")
    if isinstance(module, _conv1d()):
        return Role("matrix", transposed=True)
    if isinstance(module, (nn.Linear, _ConvNd)):
        return Role("matrix")
    if sum(size > 1 for size in shape) < 2:
        return Role("vector")
    # A parametrized weight is that of a linear layer or a convolution, whose kernel is (out_channels, everything else).
    stacked = len(shape) == 3 and not isinstance(module, ParametrizationList)
    if shape[0] == 1:
        return Role("embedding", stacked=stacked)
    # transformers' experts know how they are stored.
    return Role("matrix", transposed=stacked and bool(getattr(module, "is_transposed", False)), stacked=stacked)


def _conv1d() -> Any:
    # A model can hold a Conv1D only where its module is loaded; importing it would tie the optimizer to transformers.
    loaded = sys.modules.get("transformers.pytorch_utils")
    return loaded.Conv1D if loaded else ()


def output_head(model: nn.Module) -> set[int]:
    """Ids of the weights of the output head.

    That is what `get_output_embeddings` names, and where a model of transformers names none (classification) the last
    linear layer of each module beside its base model.
    """
    # DistributedDataParallel and torch.compile hide the methods of the model they wrap.
    model = getattr(model, "module", getattr(model, "_orig_mod", model))
    get: Any = getattr(model, "get_output_embeddings", None)
    named = get() if get else None
    heads = [named] if isinstance(named, nn.Module) else []
    base = getattr(model, getattr(model, "base_model_prefix", None) or " ", None)
    if get and not heads and base is not None:
        beside = (child for child in model.children() if child is not base)
        heads = [m for child in beside for m in [m for m in child.modules() if isinstance(m, nn.Linear)][-1:]]
    return {id(p) for module in heads for p in module.parameters()}
