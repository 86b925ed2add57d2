"""The shard adapters on real processes: right answers, each matrix worked on once, no more collectives than said."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from mars_hf import MARS
from mars_hf.optim.sharding import base, flat, layouts, whole_norms
from mars_hf.optim.sharding.base import divide
from mars_hf.optim.sharding.dtensor import dtensor_sharding
from mars_hf.optim.sharding.replicated import ReplicatedTensors

SHAPES = [(7, 5), (4, 9), (7, 5), (1, 6), (7, 5), (11, 3), (4, 9)]


def on_ranks(count, work, tmp_path):
    """Runs work(rank) in `count` processes of one gloo group; an exception in any of them fails the test."""
    mp.spawn(_rank, (count, work, str(tmp_path / "store")), nprocs=count)


def _rank(rank, count, work, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    work(rank)
    dist.barrier()
    dist.destroy_process_group()


def whole_matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Counter:
    """Counts the calls of torch.distributed functions and the matrices that a function of whole matrices is given."""

    def __init__(self, *names):
        self.calls, self.matrices = dict.fromkeys(names, 0), 0
        for name in names:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, fn):
        def call(*args, **kwargs):
            self.calls[name] += 1
            return fn(*args, **kwargs)

        return call

    def square(self, matrices):
        """A function of whole matrices whose elements depend on all others."""
        assert len({m.shape for m in matrices}) == 1
        self.matrices += len(matrices)
        return [(m / m.norm()).to(torch.float64) for m in matrices]


def check_on_whole_matrices(sharding, parts, part_of, counter, collectives_per_round):
    for limit in (2**24, 40):
        base.STACK_ELEMENTS = limit
        counter.matrices, counter.calls = 0, dict.fromkeys(counter.calls, 0)
        rounds = divide(sharding.shapes(parts), sharding.ranks)
        assert sorted(i for work in rounds for i in work.where) == list(range(len(SHAPES)))
        for work in rounds:
            results = sharding.on_whole_matrices([parts[i] for i in work.where], work, counter.square, torch.float64)
            for i, result in zip(work.where, results):
                whole = whole_matrices()[i]
                assert_close(result, part_of((whole / whole.norm()).to(torch.float64)), rtol=0, atol=1e-7)
        assert set(counter.calls.values()) == {collectives_per_round * len(rounds)}
        everyones = torch.tensor([counter.matrices])
        dist.all_reduce(everyones)
        assert everyones.item() == len(SHAPES)  # each matrix once, on one rank
    assert len(rounds) > 1


def replicated(rank):
    parts = whole_matrices()
    counter = Counter("all_gather_into_tensor")
    check_on_whole_matrices(ReplicatedTensors(dist.group.WORLD), parts, lambda whole: whole, counter, 1)


def rows(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [distribute_tensor(m, mesh, [Shard(0)]) for m in whole_matrices()]
    sharding = dtensor_sharding(tensors, "p")
    with torch.no_grad():
        parts = sharding.parts(tensors)
    counter = Counter("all_to_all_single")
    check_on_whole_matrices(
        sharding, parts, lambda whole: distribute_tensor(whole, mesh, [Shard(0)]).to_local(), counter, 2
    )
    counter = Counter("all_reduce")
    squares = torch.stack([part.square().sum() for part in parts])
    first, nothing, second = whole_norms([sharding] * 3, [squares, None, 4 * squares])
    assert counter.calls == {"all_reduce": 1}
    norms = torch.stack([m.double().norm() for m in whole_matrices()])
    assert_close(first, norms, rtol=1e-6, atol=0)
    assert_close(second, 2 * norms, rtol=1e-6, atol=0)
    assert nothing is None


def whole_and_rows(rank):
    replicated(rank)
    rows(rank)


@pytest.mark.parametrize("count", [2, 3])
def test_each_matrix_is_worked_on_once(count, tmp_path):
    on_ranks(count, whole_and_rows, tmp_path)


def trajectories(rank):
    """Every rule on rows sharded over one dimension of a mesh (HSDP), and on whole DTensors, against plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
        for mars_type in ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight"):
            plain = [torch.nn.Parameter(m) for m in whole_matrices()]
            sharded = [torch.nn.Parameter(distribute_tensor(m, mesh, placements)) for m in whole_matrices()]
            arguments = {"ns_dtype": torch.float32, "clip_c": 0.5, "weight_decay": 0.1}
            one, many = (
                MARS([{"params": params, "rule": mars_type}], mars_type=mars_type, **arguments)
                for params in (plain, sharded)
            )
            generator = torch.Generator().manual_seed(1)
            for _ in range(4):
                for p, q in zip(plain, sharded):
                    p.grad = torch.randn(p.shape, generator=generator) * 0.2
                    q.grad = distribute_tensor(p.grad, mesh, placements)
                one.step()
                many.step()
            for p, q in zip(plain, sharded):
                assert_close(q.full_tensor(), p.detach(), rtol=0, atol=2e-6, msg=f"{mars_type} {placements}")
                state = many.state[q]
                assert all(isinstance(t, DTensor) for name, t in state.items() if name != "step")


def test_dtensors_on_a_mesh_of_two_dimensions(tmp_path):
    on_ranks(4, trajectories, tmp_path)


def unserved(rank):
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(6, 4\)\) has the placements .* use FSDP2"):
        MARS([{"params": [tensor], "rule": "mars-adamw"}])


def test_other_placements_are_refused(tmp_path):
    on_ranks(2, unserved, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_work_is_divided_evenly(ranks, monkeypatch):
    monkeypatch.setattr(base, "STACK_ELEMENTS", 100)
    shapes = [(8, 8)] * 24 + [(8, 4)] * 16
    rounds = divide(shapes, ranks)
    owners = dict(pair for work in rounds for pair in zip(work.where, work.owners))
    costs = [8 * 8 * 8] * 24 + [8 * 4 * 4] * 16
    work = [sum(cost for i, cost in enumerate(costs) if owners[i] == r) for r in range(ranks)]
    assert max(work) - min(work) <= max(costs)
    assert sorted(i for work in rounds for i in work.where) == list(range(40))
    for work in rounds:
        for r in range(ranks):
            mine = [i for i in work.where if owners[i] == r]
            assert len(mine) <= 1 or sum(shapes[i][0] * shapes[i][1] for i in mine) <= 100


def test_a_flat_tensor_of_no_known_engine_is_an_error():
    matrix = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = MARS([{"params": [matrix], "rule": "mars-adamw"}])
    vector = torch.nn.Parameter(torch.ones(12))
    vector.grad = torch.ones(12)
    optimizer.param_groups[0]["params"] = [vector]
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(12,\)\) is no matrix.*FSDP1"):
        optimizer.step()
    assert not optimizer.state


def refuse_fsdp1(rank):
    module = FullyShardedDataParallel(nn.Linear(5, 6), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="was flattened by FSDP1"):
        MARS(module.parameters(), optimize_1d=True)  # which serves vectors, so that only the flag tells


def refuse_a_group_of_others(rank):
    others = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="process_group: this rank is not in it"):
            MARS([nn.Parameter(torch.ones(3, 2))], process_group=others)


def gradients_in_other_placements(rank):
    """DTensors without an engine: autograd leaves sums to be added up, or whole gradients of sharded parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    whole, inputs = (torch.randn(shape, generator=generator) for shape in ((6, 5), (4, 6)))
    for placements, of_inputs, of_grad in (
        ([Replicate()], [Shard(0)], Partial()),
        ([Shard(0)], [Replicate()], Replicate()),
    ):
        plain = nn.Parameter(whole.clone())
        many = nn.Parameter(distribute_tensor(whole, mesh, placements))
        for p, x in ((plain, inputs), (many, distribute_tensor(inputs, mesh, of_inputs))):
            optimizer = MARS([p], lr=0.01, clip_c=0.3)
            for _ in range(3):
                (x @ p).square().mean().backward()
                optimizer.step()
                assert p is plain or p.grad.placements == (of_grad,)
                optimizer.zero_grad()
        assert_close(many.full_tensor(), plain, rtol=0, atol=1e-6)


def checkpoint_before_training(rank):
    """torch.distributed.checkpoint steps a new optimizer, to see its state: that step must not count."""
    trained = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(5, 6))
        optimizer = MARS(model.parameters(), is_approx=False)
        if looks:
            state_dict = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(model, optimizer, state_dict)
        for _ in range(2):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.update_previous_grad()
            optimizer.step()
            optimizer.update_last_grad()
            optimizer.zero_grad()
        trained.append([p.full_tensor() for p in model.parameters()])
    assert_close(trained[0], trained[1], rtol=0, atol=0)


def step_a_flat_tensor_without_gradient(rank):
    """A flat tensor of ZeRO whose gradients are all zero at the first step is trained like any other."""
    buffer = torch.arange(12.0) - 5
    original = nn.Parameter(buffer.view(4, 3))
    optimizer = MARS([{"params": [original], "rule": "mars-adamw"}], weight_decay=0.1)
    alone = nn.Parameter(buffer.view(4, 3).clone())
    reference = MARS([{"params": [alone], "rule": "mars-adamw"}], weight_decay=0.1)
    original._dp_group = dist.group.WORLD
    share = nn.Parameter(buffer.chunk(dist.get_world_size())[rank].clone())
    optimizer.param_groups[0]["params"] = [share]
    for gradient in (0.0, 1.0):
        share.grad, alone.grad = torch.full_like(share, gradient), torch.full_like(alone, gradient)
        optimizer.step()
        reference.step()
    assert_close(share, alone.view(-1).chunk(dist.get_world_size())[rank], rtol=0, atol=1e-6)


def all_of_them(rank):
    refuse_fsdp1(rank)
    refuse_a_group_of_others(rank)
    gradients_in_other_placements(rank)
    checkpoint_before_training(rank)
    step_a_flat_tensor_without_gradient(rank)


def test_loops_without_a_trainer(tmp_path):
    on_ranks(2, all_of_them, tmp_path)


class Sent(Exception):
    """Ends a call at its first collective."""


def test_offloaded_parts_travel_between_accelerators(tmp_path, monkeypatch):
    def send(*tensors, **kwargs):
        assert all(t.device.type == "meta" for t in tensors if isinstance(t, torch.Tensor))
        raise Sent

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    dist.init_process_group("cuda:gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
        assert base.communication_device(group, cpu) == torch.device("cuda", 3)
        assert base.communication_device(group, gpu) == gpu
        # Meta tensors stand in for those of an accelerator.
        monkeypatch.setattr(base, "communication_device", lambda group, own: torch.device("meta"))
        monkeypatch.setattr(flat, "communication_device", lambda group, own: torch.device("meta"))
        monkeypatch.setattr(dist, "all_reduce", send)
        monkeypatch.setattr(dist, "all_to_all_single", send)
        shards = flat.FlatShards([flat.Slices((4, 3), [(0, 12)])], group)
        with pytest.raises(Sent):
            whole_norms([shards], [torch.ones(1)])
        parts = [torch.ones(12)]
        (work,) = divide(shards.shapes(parts), shards.ranks)
        with pytest.raises(Sent):
            shards.on_whole_matrices(parts, work, list, torch.float32)
    finally:
        dist.destroy_process_group()


def test_plain_tensors_ask_nobody():
    p = torch.nn.Parameter(torch.ones(3, 2))
    ((same, sharding),) = layouts([p], [p], None, {}, str)
    assert same[0] is p
    assert sharding.whole
