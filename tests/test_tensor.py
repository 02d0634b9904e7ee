"""Layers that are cut: what each rank holds and sends, what is refused, and what is whole again afterwards."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.placement import Fused, tensor_axis
from lightning_partrain.parallel.tensor.tensor import TensorParallel
from lightning_partrain.strategies import Hybrid3DStrategy
from lightning_partrain.strategies.auto_sizes import parse_memory
from tests.harness import run_ranks, trainer
from tests.models import BATCH, CASES, Base, Case
from tests.parity import Run, assert_same_as_one_process, hybrid, shares
from tests.pipeline_models import PIPELINE_CASES
from tests.tensor_models import PLANS, TENSOR_CASES
from tests.test_memory import held
from tests.test_traffic import WINDOW, OneWindow

# -- shares --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", TENSOR_CASES)
def test_each_rank_holds_its_share(case: str, tensor: int) -> None:
    """Of the blocks at least nine tenths are cut, and whole are only norms, biases that are added to sums, and position tables."""

    def fit(rank: int) -> dict[str, tuple[int, int]]:
        torch.manual_seed(0)
        module = TENSOR_CASES[case].build()
        found: dict[str, tuple[int, int]] = {}

        def hook(*_: Any) -> None:
            for name, param in module.named_parameters():
                local = param.to_local() if isinstance(param, DTensor) else param
                found[name] = (param.numel(), local.untyped_storage().nbytes() // local.element_size())

        module.on_train_start = hook
        plan = PLANS.get(case, "auto")
        strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, tensor_parallel_plan=plan, zero_stage=0)
        trainer(strategy, tensor, max_steps=1).fit(module, shares(TENSOR_CASES[case].data(torch.float32), 0, 1))
        return found

    first, *others = run_ranks(tensor, fit)
    assert all(other == first for other in others)
    whole = {name: numel for name, (numel, here) in first.items() if here == numel}
    cut = {name: numel for name, (numel, here) in first.items() if here * tensor == numel and numel > here}
    print(f"{case}: whole on each rank: {', '.join(whole)}")
    assert len(whole) + len(cut) == len(first)
    allowed = ("norm", "LayerNorm", "ln_", "bias", "position", "wpe", "token_type")
    blocks = [name for name in first if any(f".{part}." in f".{name}" for part in ("layers", "layer", "blocks", "h"))]
    assert blocks and all(any(word in name for word in allowed) for name in whole if name in blocks)
    numbers = {name: first[name][0] for name in blocks}
    assert sum(n for name, n in numbers.items() if name in cut) >= 0.9 * sum(numbers.values())
    if TENSOR_CASES[case].tokens:
        outside = [name for name in whole if name not in blocks]
        assert all(any(word in name for word in allowed) for name in outside), outside


@pytest.mark.parametrize(("stage", "data"), [(0, 1), (1, 2), (3, 2)])
def test_bytes_of_state_are_divided(stage: int, data: int) -> None:
    """Stage by stage as without tensor parallelism, with half of what is cut."""

    def fit(rank: int, tensor: int) -> tuple[int, int, int]:
        torch.manual_seed(0)
        module, bytes_held = TENSOR_CASES["gpt8"].build(), [0]
        module.on_before_optimizer_step = lambda *_: bytes_held.__setitem__(0, held(module.trainer.strategy))
        strategy = Hybrid3DStrategy(zero_stage=stage, tensor_parallel_size=tensor, reduce="micro_batch")
        trainer(strategy, data * tensor, max_steps=3).fit(
            module, shares(TENSOR_CASES["gpt8"].data(torch.float32), 0, 1)
        )
        whole = sum(
            p.nbytes
            for n, p in module.named_parameters()
            if "norm" in n or "position" in n or "o_proj.bias" in n or "down_proj.bias" in n
        )
        return bytes_held[0], whole, sum(p.nbytes for p in module.parameters())

    alone, *_ = run_ranks(data, lambda rank: fit(rank, 1))
    cut, *_ = run_ranks(2 * data, lambda rank: fit(rank, 2))
    replicated = cut[1] / cut[2]
    assert cut[0] == pytest.approx(alone[0] * (replicated + (1 - replicated) / 2), rel=0.02)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_module_is_whole_and_its_own_afterwards(stage: int) -> None:
    def fit(rank: int) -> tuple[bool, bool, bool]:
        module = TENSOR_CASES["gpt2h4"].build()
        before = dict(module.named_parameters())
        attributes = {name: set(vars(m)) for name, m in module.named_modules()}
        strategy = Hybrid3DStrategy(tensor_parallel_size=2, zero_stage=stage)
        run = trainer(strategy, 4, max_steps=2)
        run.fit(module, shares(TENSOR_CASES["gpt2h4"].data(torch.float32), rank // 2, 2))
        left = {name: set(vars(m)) - attributes[name] for name, m in module.named_modules() if name}
        plain = all(type(p) is nn.Parameter for p in module.parameters())
        same = stage == 3 or all(p is before[n] for n, p in module.named_parameters())
        split = module.model.transformer.h[0].attn.split_size == 16
        run.validate(module, shares(TENSOR_CASES["gpt2h4"].data(torch.float32), rank // 2, 2), verbose=False)
        return plain and split, same, not any(left.values())

    assert run_ranks(4, fit) == [(True, True, True)] * 4


def test_activations_are_freed_after_each_step() -> None:
    def fit(rank: int) -> list[int]:
        torch.manual_seed(0)
        module = TENSOR_CASES["gpt8"].build()
        seen: list[Any] = []
        alive: list[int] = []
        for block in module.model.blocks:
            block.mlp.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
        module.on_train_batch_end = lambda *_: alive.append(sum(ref() is not None for ref in seen))
        run = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2)
        run.fit(module, shares(TENSOR_CASES["gpt8"].data(torch.float32), 0, 1))
        return alive

    assert run_ranks(2, fit) == [[0] * 7] * 2


def test_a_norm_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    def fit(rank: int) -> tuple[float, float]:
        torch.manual_seed(0)
        module, norms = TENSOR_CASES["mlp"].build(), []

        def spoil(*_: Any) -> None:
            grad = module.blocks[1].up.weight.grad
            if rank == 0:
                local_tensor(grad)[0, 0] = float("inf")
            norms.append(float(module.trainer.strategy.grad_norm()))
            norms.append(float(module.trainer.strategy.grad_norm(float("inf"))))

        module.on_before_optimizer_step = spoil
        strategy = Hybrid3DStrategy(tensor_parallel_size=2, zero_stage=0)
        run = trainer(strategy, 2, max_steps=1)
        run.fit(module, shares(TENSOR_CASES["mlp"].data(torch.float32), 0, 1))
        return norms[0], norms[1]

    assert run_ranks(2, fit) == [(float("inf"), float("inf"))] * 2


# -- traffic -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "tensor", "stages"), [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_bytes_between_tensor_parallel_ranks(data: int, tensor: int, stages: int) -> None:
    """Two sums of activations a block forward and two backward, one for the embedding, one for the head's input, and the logits
    gathered (docs/strategies/tensor.md)."""
    layers, width, time, vocabulary = 4, 16, 12, 256

    def fit(rank: int) -> dict[str, dict[str, tuple[int, float]]]:
        torch.manual_seed(0)
        TensorParallel.is_time_to_look = lambda _: False  # type: ignore[method-assign]  # of this rank only
        counter = OneWindow()
        strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, zero_stage=0)
        run = trainer(
            strategy, data * tensor * stages, callbacks=[counter], accumulate_grad_batches=WINDOW, max_steps=2
        )
        replica = rank // tensor % data
        run.fit(TENSOR_CASES["gpt8"].build(), shares(TENSOR_CASES["gpt8"].data(torch.float32), replica, data))
        by_axis = counter.traffic.by_axis
        return {axis: {name: (c.calls, c.sent) for name, c in ops.items()} for axis, ops in by_axis.items()}

    activation = WINDOW * BATCH // data * time * width * 4
    logits = WINDOW * BATCH // data * time * vocabulary * 4
    share = (tensor - 1) / tensor
    ranks = run_ranks(data * tensor * stages, fit)
    sums = sum(ops["tp"]["allreduce"][1] for ops in ranks) / (data * tensor)
    gathered = sum(ops["tp"].get("allgather", (0, 0.0))[1] for ops in ranks) / (data * tensor)
    assert sums == pytest.approx((4 * layers + 2) * activation * 2 * share)
    assert gathered == pytest.approx(logits * share)
    if data > 1:  # over the data-parallel axis go the gradients of a rank's part
        numbers = sum(p.numel() for n, p in held_parts(tensor))
        flags = len(held_parts(tensor))
        assert ranks[0]["data_parallel"]["allreduce"][1] == pytest.approx(4 * (numbers + flags) * 2 * (data - 1) / data)


def held_parts(tensor: int) -> list[tuple[str, Tensor]]:
    """The eight-headed GPT's parameters as a rank holds them."""
    whole = ("norm", "position", "o_proj.bias", "down_proj.bias")
    named = TENSOR_CASES["gpt8"].build().named_parameters()
    return [(n, p.flatten()[: p.numel() if any(w in n for w in whole) else p.numel() // tensor]) for n, p in named]


def test_a_stage_gathers_each_parameter_once_a_window() -> None:
    """Stage 3 on a pipeline keeps what it gathered for the window."""

    def fit(rank: int) -> tuple[float, int]:
        torch.manual_seed(0)
        counter = OneWindow()
        strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, zero_stage=3)
        run = trainer(strategy, 8, callbacks=[counter], accumulate_grad_batches=WINDOW, max_steps=2)
        module = TENSOR_CASES["gpt8"].build()
        part = [0]
        module.on_train_start = lambda *_: part.__setitem__(
            0, sum(p.to_local().numel() for p in run.strategy.model_parallel.named_parameters().values())
        )
        run.fit(module, shares(TENSOR_CASES["gpt8"].data(torch.float32), rank // 2 % 2, 2))

        gathers = [c for name, c in counter.traffic.by_axis["dp_shard"].items() if "gather" in name]
        return sum(c.sent for c in gathers), part[0]

    for sent, numbers in run_ranks(8, fit):
        assert sent == pytest.approx(4 * numbers, rel=0.02)  # half of twice what is held of each


# -- the user's own ------------------------------------------------------------------------------------------------------


class OwnPlan(Base):
    """Written for Lightning's ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def configure_model(self) -> None:
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.net(batch[0]))), batch[1])


@pytest.mark.parametrize(("data", "stage", "accumulate"), [(1, 0, 1), (2, 1, 3), (2, 3, 1)])
def test_configure_model_with_its_own_plan_keeps_it(
    data: int, stage: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "own_plan", Case(OwnPlan))
    run = Run("own_plan", accumulate=accumulate, clip=("norm", 0.1))
    assert_same_as_one_process(run, 2 * data, hybrid(zero_stage=stage, tensor_parallel_size=2), tensor=2)


# -- refused -------------------------------------------------------------------------------------------------------------


class NoStep(pl.Callback):
    """The parameters have not changed when a plan turns out to be wrong."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        raise AssertionError("a step has begun")


def refused(
    build: Callable[[], Any], plan: Any = "auto", tensor: int = 2, loader: Any = None, tokens: bool = False
) -> str:
    """The message that every rank got, before the first optimizer step."""

    def fit(rank: int) -> str:
        torch.manual_seed(0)
        data = Case(build, tokens=tokens).data(torch.float32)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, tensor_parallel_plan=plan, timeout=15)
            run = trainer(strategy, tensor, callbacks=[NoStep()])
            run.fit(build(), loader(rank) if loader is not None else shares(data, 0, 1))
        return str(caught.value)

    first, *others = run_ranks(tensor, fit, timeout=40)
    assert all(other == first for other in others), "every rank says the same"
    return first


def contains(message: str, *words: str) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


class Attention(Base):
    """Attention that cannot be cut as it is written: it makes its heads from a number that it keeps under a name of its own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.how_many, self.head_dim = 2, 6
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            heads = [
                p(x).view(*x.shape[:2], self.how_many, -1).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            ]
            return self.o_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.Layer()
        self.head = nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        x = torch.stack([batch[0], batch[0].roll(1, 1), batch[0].roll(2, 1)], 1)
        return F.cross_entropy(self.head(self.layer(x).mean(1)), batch[1])


class Scaled(Base):
    """A parameter between the two layers of a pair."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down, self.head = nn.Linear(12, 16), self.Scale(), nn.Linear(16, 12), nn.Linear(12, 5)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.down(torch.tanh(self.scale(self.up(batch[0]))))), batch[1])


class FunctionalTie(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 64
        x = self.net(self.embed(tokens[:, :-1]))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), tokens[:, 1:].flatten())


class OddVocabulary(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch[0] % 97
        return F.cross_entropy(self.head(self.embed(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())


def test_sizes_that_do_not_divide_are_named_with_those_that_would_do() -> None:
    contains(
        refused(CASES["gpt"].build, tensor=4, tokens=True),
        "tensor_parallel_size=4",
        "2 heads",
        "q_proj",
        "that do: 1, 2",
    )
    contains(refused(OddVocabulary, tokens=True), "97", "vocabulary", "'embed'", "Sizes that do: 1, 97", "'replicate'")
    contains(
        refused(TENSOR_CASES["mlp"].build, tensor=3),
        "tensor_parallel_size=3",
        "features",
        "'blocks.1.gate'",
        "1, 2, 4, 8, 16",
    )


def test_patterns_and_styles_that_do_not_exist_get_the_nearest_names() -> None:
    plan = {"blocks.*.up_projj": "colwise", "down_proj": "rowwise"}
    contains(
        refused(TENSOR_CASES["gpt8"].build, plan, tokens=True), "'blocks.*.up_projj'", "matches no module", "up_proj"
    )
    with pytest.raises(ValueError) as caught:
        Hybrid3DStrategy(tensor_parallel_plan={"up_proj": "colwsie"})
    contains(str(caught.value), "'colwsie', which does not exist. Did you mean 'colwise'", "rowwise", "replicate")
    for nothing in ({}, "automatic", ["up_proj"], {3: "colwise"}):
        with pytest.raises(ValueError, match="tensor_parallel_plan must be 'auto' or a mapping"):
            Hybrid3DStrategy(tensor_parallel_plan=nothing)  # type: ignore[arg-type]


def test_one_of_a_tied_pair_is_refused() -> None:
    plan = {"head": "colwise_gather_output"}
    contains(
        refused(PIPELINE_CASES["tied_by_module"].build, plan, tokens=True),
        "'embed.weight'",
        "'head.weight'",
        "only one of them",
        "'vocabulary'",
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"up": "colwise"}, ("'up'", "leaves its output cut", "'colwise_gather_output'")),
        ({"down": "rowwise"}, ("'down'", "takes a cut input", "'rowwise_split_input'")),
        ({"up": "vocabulary"}, ("'up'", "Linear", "nn.Embedding")),
        ({"scale": "replicate"}, ("cuts no layer", "Scaled")),
        ({"up": "colwise", "down": "rowwise"}, ("gradient of 'scale.weight'", "'replicated_with_grad_allreduce'")),
    ],
)
def test_plans_that_do_not_fit_together(plan: dict[str, str], words: tuple[str, ...]) -> None:
    contains(refused(Scaled, plan), *words)


def test_a_parameter_between_cut_layers_with_its_style(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "scaled", Case(Scaled))
    plan = {"up": "colwise", "down": "rowwise", "scale": "replicated_with_grad_allreduce"}
    assert_same_as_one_process(Run("scaled"), 2, hybrid(tensor_parallel_size=2, tensor_parallel_plan=plan), tensor=2)


def test_a_layer_that_gives_other_numbers_when_cut_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(Attention)
    contains(message, "'layer'", "gives other numbers", "tensor_parallel_plan={'*': 'auto', 'layer.*': 'replicate'}")
    monkeypatch.setitem(CASES, "attention", Case(Attention))
    plan = {
        "q_proj": "colwise_gather_output",
        "k_proj": "colwise_gather_output",
        "v_proj": "colwise_gather_output",
        "o_proj": "rowwise_split_input",
    }
    assert_same_as_one_process(Run("attention"), 2, hybrid(tensor_parallel_size=2, tensor_parallel_plan=plan), tensor=2)


def test_a_weight_that_is_used_outside_of_its_layer() -> None:
    plan = {"*": "auto", "embed": "vocabulary"}
    contains(refused(FunctionalTie, plan, tokens=True), "used outside of its layer", "'replicate'")


def test_auto_leaves_a_weight_alone_that_functions_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "functional_tie", Case(FunctionalTie, tokens=True))
    assert_same_as_one_process(Run("functional_tie"), 2, hybrid(tensor_parallel_size=2), tensor=2)


def test_different_samples_on_one_data_parallel_rank() -> None:
    def loader(rank: int) -> DataLoader:
        random.seed(rank)
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(rank))
        return DataLoader(TensorDataset(x, torch.zeros(32, dtype=torch.int64)), batch_size=16)

    contains(refused(TENSOR_CASES["mlp"].build, loader=loader), "different batches", "training_step", "seed_everything")


def test_hooks_on_gradients_of_cut_parameters() -> None:
    def build() -> Any:
        module = TENSOR_CASES["mlp"].build()
        module.blocks[1].up.weight.register_hook(lambda grad: grad * 2)
        return module

    contains(refused(build), "'blocks.1.up.weight'", "hook on its gradient", "on_before_optimizer_step")


def test_tensor_parallel_ranks_on_several_nodes_get_a_warning() -> None:
    def fit(rank: int) -> bool:
        import os

        os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
        with (
            pytest.warns(UserWarning, match="spans several nodes, which have 1 ranks each") if rank == 0 else _nothing()
        ):
            run = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 1, num_nodes=2, max_steps=1)
            run.fit(TENSOR_CASES["mlp"].build(), shares(TENSOR_CASES["mlp"].data(torch.float32), 0, 1))
        return True

    assert all(run_ranks(2, fit))


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    def build() -> Any:
        module = TENSOR_CASES["mlp"].build()
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
        return module

    contains(refused(build), "LBFGS")


# -- sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, (8, 1, 1)), ("1GiB", (8, 1, 1)), ("170KiB", (4, 2, 1)), (100 << 10, (2, 4, 1)), ("75KiB", (1, 4, 2))],
)
def test_auto_sizes_take_tensor_then_pipeline_ranks_and_fit(limit: Any, expected: tuple[int, int, int]) -> None:
    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module, most = TENSOR_CASES["gpt8"].build(), [0]
        module.on_before_optimizer_step = lambda *_: most.__setitem__(0, held(module.trainer.strategy))
        strategy = Hybrid3DStrategy(memory_limit=limit)
        run = trainer(strategy, 8, max_steps=3)
        run.fit(module, shares(TENSOR_CASES["gpt8"].data(torch.float32), 0, 1))
        sizes = strategy.mesh.sizes
        return (sizes.data_parallel_size, sizes.tp, sizes.pp), most[0]

    results = run_ranks(8, fit)
    assert {sizes for sizes, _ in results} == {expected}
    if limit is not None:
        assert max(most for _, most in results) <= parse_memory(limit)


def test_auto_sizes_say_when_nothing_fits_and_what_they_cannot_do() -> None:
    def fit(rank: int) -> list[str]:
        messages = []
        for options in ({"memory_limit": "20KiB"}, {"memory_limit": "100KiB", "data_parallel_size": 4}):
            with pytest.raises(ValueError) as caught:
                trainer(Hybrid3DStrategy(**options), 4, max_steps=1).fit(TENSOR_CASES["gpt8"].build())
            messages.append(str(caught.value))
        return messages

    for none, fixed in run_ranks(4, fit):
        contains(none, "memory_limit", "the smallest layout", "more than 80% of 20.0 KiB", "zero_stage (now 1)")
        contains(fixed, "the smallest layout, data_parallel_size 4, needs")


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("1.5 GB", 1_500_000_000), (4096, 4096), ("512MiB", 512 << 20)]
)
def test_memory_in_words(text: Any, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "24 gigs", 0, -1, True, "0GiB", "0.1B", 0.5, float("inf"), "1e9"])
def test_memory_that_is_none(text: Any) -> None:
    with pytest.raises(ValueError, match="memory_limit must be"):
        Hybrid3DStrategy(memory_limit=text)


# -- parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 4, 4), (6, 2)])
def test_fused_orders_undo_each_other(sizes: tuple[int, ...]) -> None:
    fused = Fused(1, sizes, 2)
    whole = torch.arange(2 * sum(sizes)).view(2, -1)
    cut = fused.by_rank(whole)
    assert torch.equal(fused.by_matrix(cut), whole)
    first, start = cut.chunk(2, 1)[0], 0
    expected = []
    for size in sizes:
        expected.append(whole[:, start : start + size // 2])
        start += size
    assert torch.equal(first, torch.cat(expected, 1))


def test_plain_tensors_have_no_tensor_axis() -> None:
    assert tensor_axis(torch.ones(2)) is None
