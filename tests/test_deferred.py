"""Models that are built without their numbers get those that they would have had, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_partrain.parallel import recorded
from lightning_partrain.parallel.deferred import (
    DeferredInit,
    initial_value,
    is_deferred,
    random_states,
    set_random_states,
)
from lightning_partrain.parallel.materialize import initial_values


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def built(build: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return build(), torch.rand(1)


def built_deferred(build: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    with DeferredInit():
        module = build()
    return module, torch.rand(1)


def check_same(build: Callable[[], nn.Module], at_least: int = 1) -> nn.Module:
    """Values, strides, and what is drawn afterwards; returns the deferred model."""
    expected, drawn = built(build)
    module, drawn_after = built_deferred(build)
    assert torch.equal(drawn, drawn_after)
    found, makers = tensors_of(module), initial_values(module)
    assert list(found) == list(tensors_of(expected))
    assert makers.keys() == {name for name, tensor in found.items() if is_deferred(tensor)}
    assert len(makers) >= at_least
    state = torch.get_rng_state()
    for name, like in reversed(tensors_of(expected).items()):
        assert name in makers or like.numel() < recorded.THRESHOLD, name
        value = makers[name]() if name in makers else found[name]
        assert (value.dtype, value.shape, value.stride()) == (like.dtype, like.shape, like.stride()), name
        assert torch.equal(value, like), name
    assert torch.equal(torch.get_rng_state(), state)
    return module


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def all_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "THRESHOLD", 1)


def causal_lm(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        small: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
        llama = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, **small}
        config = {
            "llama": lambda: transformers.LlamaConfig(**llama, tie_word_embeddings=True),
            "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **small),
            "mixtral": lambda: transformers.MixtralConfig(**llama, num_key_value_heads=2, num_local_experts=3),
        }[kind]()
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


class Tables(nn.Module):
    """Buffers that are computed."""

    def __init__(self) -> None:
        super().__init__()
        position, width = torch.arange(100).unsqueeze(1), 64
        frequencies = torch.exp(torch.arange(0, width, 2) * -0.1)
        table = torch.zeros(100, width)
        table[:, 0::2] = torch.sin(position * frequencies)
        table[:, 1::2] = torch.cos(position * frequencies)
        self.register_buffer("table", table.unsqueeze_(0))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)
        self.register_buffer("infinite", torch.triu(torch.full((64, 64), float("-inf")), 1))
        self.register_buffer("places", torch.arange(2000) / 3)
        self.order = nn.Buffer(torch.randperm(3000))
        self.copied = copy.deepcopy(self.order)
        self.rotary = nn.Buffer(torch.outer(torch.arange(100.0), 1 / torch.arange(1.0, 40.0)))
        self.rates = torch.linspace(0, 1, 5).tolist()
        assert torch.rand(3).numpy().shape == (3,)


class Initialised(nn.Module):
    """Of all that ``nn.init`` has, through views and of parts, applied and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.truncated = nn.Parameter(torch.empty(60, 50))
        self.tail = nn.Parameter(torch.empty(60, 50))
        self.transposed = nn.Parameter(torch.empty(64, 32).t())
        self.conv = nn.Conv2d(20, 20, 3)
        self.embedding = nn.Embedding(100, 40, padding_idx=3)
        nn.init.trunc_normal_(self.truncated, std=0.02)
        nn.init.trunc_normal_(self.tail, a=2, b=3)
        nn.init.orthogonal_(self.first.weight)
        nn.init.uniform_(self.transposed)
        nn.init.dirac_(self.conv.weight)
        nn.init.sparse_(self.second.weight, 0.3)
        self.apply(self._initialise)
        with torch.no_grad():
            self.first.weight[3].zero_()
            self.first.weight[:, :5].normal_()
            self.truncated /= self.truncated.norm()
            self.truncated[self.truncated > 0.01] = 1

    def _initialise(self, module: nn.Module) -> None:
        if module is self.first:
            nn.init.xavier_normal_(module.weight)


class Unusual(nn.Module):
    """Numbers that decide, shapes that rest on numbers, aliases, and what passes by operators."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(3000)
        self.positive = nn.Parameter(drawn[drawn > 0])
        self.different = nn.Parameter(torch.unique(torch.randint(5000, (4000,))).float())
        self.weight = nn.Parameter(torch.randn(50, 60) * 3)
        self.weight.data.mul_(1 / self.weight.std().item())
        self.turned = nn.Parameter(self.weight.data.t())
        self.flat = nn.Parameter(torch.randn(40, 60).t().reshape(-1))
        self.same = nn.Parameter(drawn.contiguous())
        self.part = nn.Parameter(torch.randn(100, 50)[10:70])
        self.stack = nn.Parameter(torch.stack([torch.randn(30, 40) for _ in range(3)]))
        self.half = nn.Linear(50, 50).half()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(50, 50))
        self.rnn = nn.LSTM(40, 40, 2)
        self.copies = nn.ModuleList(copy.deepcopy(self.rnn) for _ in range(2))
        self.shrunk = nn.Parameter(torch.randn(40, 40).mul_(2 if self.rnn.weight_hh_l0.mean() > 0 else 3))
        torch._foreach_mul_([self.flat.data, self.stack.data], 2.0)
        square = torch.empty(40, 40).normal_()
        self.rows = nn.Parameter(square.copy_(square.detach()))
        drawn.mul_(2)  # same is drawn, not a copy
        own = torch.Generator().manual_seed(5)
        self.generated = nn.Parameter(torch.empty(40, 40).normal_(generator=own))
        self.again = nn.Parameter(torch.randn(40, 40, generator=own))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.head.weight = self.embedding.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(40, 40),
    "bilinear": lambda: nn.Bilinear(20, 20, 20),
    "batchnorm": lambda: nn.Sequential(nn.Conv2d(20, 20, 3), nn.BatchNorm2d(2048)),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2, enable_nested_tensor=False),
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 64, batch_first=True),
    "tables": Tables,
    "initialised": Initialised,
    "unusual": Unusual,
    "tied": Tied,
    "llama": causal_lm("llama"),
    "gpt2": causal_lm("gpt2"),
    "mixtral": causal_lm("mixtral"),
}


@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name: str, default_dtype: None) -> None:
    check_same(MODELS[name])


@pytest.mark.parametrize("name", ["encoder", "tables", "initialised", "llama"])
def test_bit_for_bit_with_small_tensors_deferred(name: str, all_deferred: None) -> None:
    module = check_same(MODELS[name])
    assert all(is_deferred(tensor) for tensor in tensors_of(module).values())


def test_parameters_stay_the_objects_they_were() -> None:
    module, _ = built_deferred(Tied)
    weight = module.head.weight
    assert module.embedding.weight is weight
    assert torch.isnan(weight).all()
    weight.data = initial_value(weight)
    assert module.embedding.weight is weight
    assert not is_deferred(weight)
    assert torch.equal(weight, built(Tied)[0].head.weight)
    with pytest.raises(ValueError, match=r"\(50, 40\) is not deferred"):
        initial_value(weight)


def test_records_go_with_the_tensors() -> None:
    module, _ = built_deferred(lambda: nn.Linear(40, 40))
    record = weakref.ref(recorded.record_of(module.weight))
    module.weight.data = initial_value(module.weight)
    gc.collect()
    assert record() is None


def test_values_are_fresh() -> None:
    module, _ = built_deferred(Unusual)
    initial_value(module.part).zero_()
    assert initial_value(module.part).abs().sum() > 0
    assert initial_value(module.part).untyped_storage().nbytes() == 60 * 50 * 4


def test_the_dtype_of_then() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        module, _ = built_deferred(Tables)
    finally:
        torch.set_default_dtype(torch.float32)
    assert initial_value(module.places).dtype == torch.float64


def test_used_again_and_within_itself() -> None:
    def build(mode: Any) -> nn.Module:
        torch.manual_seed(3)
        with mode:
            module = nn.Sequential(nn.Linear(40, 40))
        with mode:
            with mode, mode:
                module.append(nn.Linear(40, 40))
            module.append(copy.deepcopy(module[1]))
            return module.half()

    module = build(DeferredInit())
    for name, like in build(contextlib.nullcontext()).state_dict().items():
        got = tensors_of(module)[name]
        assert is_deferred(got) == name.endswith("weight")
        assert torch.equal(initial_value(got) if is_deferred(got) else got, like)


def test_copies_made_outside() -> None:
    module, _ = built_deferred(lambda: nn.Sequential(Tables(), Tied()))
    twin = copy.deepcopy(module)
    assert twin[1].head.weight is twin[1].embedding.weight
    assert twin[1].head.weight is not module[1].head.weight
    for name, make in initial_values(module).items():
        assert torch.equal(initial_values(twin)[name](), make()), name
    real = nn.Linear(40, 40)
    assert torch.equal(copy.deepcopy(real).weight, real.weight)


def test_views_taken_outside_are_refused() -> None:
    module, _ = built_deferred(lambda: nn.Linear(40, 40))
    with pytest.raises(ValueError, match=r"shape \(40,\) is a view"):
        initial_value(module.weight[0])


def test_numbers_for_python() -> None:
    torch.manual_seed(1)
    expected = torch.randn(50, 50)
    torch.manual_seed(1)
    with DeferredInit():
        drawn = torch.randn(50, 50)
        assert is_deferred(drawn)
        assert drawn.is_contiguous() and drawn.stride() == (50, 1)
        assert drawn.tolist() == expected.tolist()
        assert (drawn.numpy() == expected.numpy()).all()
        with pytest.raises(ValueError, match="read-only"):
            drawn.numpy()[0] = 1
        assert drawn[3, 4].item() == expected[3, 4].item()
        assert torch.equal(drawn, expected)
        small = torch.zeros(50)
        small.copy_(drawn[0])
        assert torch.equal(small, expected[0])
        assert not is_deferred(small)


def test_a_list_of_deferred_and_real_ones() -> None:
    torch.manual_seed(1)
    expected = torch.randn(50, 50)
    torch.manual_seed(1)
    with DeferredInit():
        large, small = torch.randn(50, 50), torch.ones(3)
        torch._foreach_mul_([large, small], 2.0)
        large.mul_(small[0])
    assert small.tolist() == [2, 2, 2]
    for _ in range(2):
        assert torch.equal(initial_value(large), expected * 4)
    assert small.tolist() == [2, 2, 2]


def test_tensors_that_are_not_plain() -> None:
    with DeferredInit():
        module = nn.Sequential(nn.LazyLinear(50), nn.Linear(50, 50))
        with torch.inference_mode():
            module[1].weight.data.copy_(torch.tensor([list(range(50))] * 50))
        sparse = torch.eye(50).to_sparse() * 2
    assert initial_values(copy.deepcopy(module)).keys() == {"1.weight"}
    assert initial_value(module[1].weight).sum() == 50 * 49 * 25
    assert sparse.to_dense().sum() == 100
    with torch.device("meta"), DeferredInit():
        assert nn.Linear(50, 50).weight.is_meta
        assert not is_deferred(torch.randn(50, 50))


def test_loading_while_it_is_built() -> None:
    saved = nn.Linear(40, 40).state_dict()

    def build() -> nn.Module:
        module = nn.Linear(40, 40)
        module.load_state_dict(saved)
        return module

    module = check_same(build)
    saved["weight"].zero_()
    with pytest.raises(RuntimeError, match=r"copy_.*\(40, 40\).*written to.*outside of DeferredInit"):
        initial_value(module.weight)


LIBRARY = torch.library.Library("partrain_test", "DEF")
LIBRARY.define("twice_(Tensor(a!) tensor) -> ()")


def test_what_cannot_be_put_off_is_named() -> None:
    with DeferredInit():
        drawn = torch.randn(50, 50)
        with pytest.raises(RuntimeError, match=r"aten.resize_.default cannot be put off.*outside of DeferredInit"):
            drawn.resize_(10, 10)
        with pytest.raises(
            RuntimeError, match=r"partrain_test.twice_.default writes .* meta device.*outside of DeferredInit"
        ):
            torch.ops.partrain_test.twice_(drawn)
        indices = torch.full((2000,), 50)
        lost = drawn[indices]
    with pytest.raises(RuntimeError, match=r"aten.index.Tensor was put off .* out of bounds.*outside of DeferredInit"):
        initial_value(lost)


def test_random_states_of_another_process() -> None:
    build = MODELS["gpt2"]
    first, second = built_deferred(build, 1)[0], built_deferred(build, 2)[0]
    states = random_states(first)
    assert states and all(state.dtype == torch.uint8 for state in states)
    set_random_states(second, states)
    makers = initial_values(second)
    for name, make in initial_values(first).items():
        assert torch.equal(makers[name](), make()), name
    with pytest.raises(ValueError, match=rf"draws random numbers {len(states)} times, where {len(states) - 1}"):
        set_random_states(second, states[1:])


def test_random_states_do_not_fit_what_numbers_decided() -> None:
    def build() -> nn.Module:
        module = nn.Linear(40, 40)
        module.weight.data.mul_(1 / module.weight.std().item())
        return module

    first, second = built_deferred(build, 1)[0], built_deferred(build, 2)[0]
    set_random_states(first, random_states(first))
    with pytest.raises(ValueError, match=r"built by a number that aten.uniform_.default drew.*seed_everything"):
        set_random_states(second, random_states(first))


def peak_of(work: Callable[[int], Any]) -> int:
    """By how many bytes the resident memory of a forked process grows at most; libraries are read before, at a small ``work``."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(64)
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            work(4096)
            os.write(write, str(status("VmHWM") - before).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        grown = file.read()
    os.waitpid(child, 0)
    return int(grown)


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
def test_memory_of_one_tensor() -> None:
    """64 million numbers that are drawn in 4 tensors, while a model is built, and while it is given them."""

    def work(width: int) -> None:
        module, _ = built_deferred(lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]))
        for make in initial_values(module).values():
            make()

    one = 4 * 4096**2
    assert one * 0.9 < peak_of(work) < one * 1.2


class Rows(nn.Module):
    """A parameter of its own, next to a child that it initialises too."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.rows = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("places", torch.empty(5, dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.child.reset_parameters()
        self.rows.data.normal_()
        self.places = torch.arange(5, device=self.places.device)


def in_order(module: nn.Module) -> dict[str, Tensor]:
    """As one process does it that has the memory."""
    for each in module.modules():
        each.to_empty(device="cpu", recurse=False)
    for each in module.modules():
        if isinstance(each, Tied):
            each.head.weight = each.embedding.weight
    for each in module.modules():
        if isinstance(each, Rows):
            each.rows.data.normal_()
            each.places = torch.arange(5)
        elif hasattr(each, "reset_parameters"):
            each.reset_parameters()
    return {name: tensor.clone() for name, tensor in tensors_of(module).items()}


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_meta_tensors_are_initialised_in_order() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Rows(), nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(4)), Tied())

    torch.manual_seed(7)
    expected, after = in_order(meta(build)), torch.rand(1)
    module = meta(build)
    torch.manual_seed(7)
    makers = initial_values(module)
    assert torch.equal(torch.rand(1), after)
    assert makers.keys() == expected.keys()
    with torch.no_grad():
        for owner in module.modules():  # makers go by what the model was, while it is filled and cut
            for name in owner._parameters:
                setattr(owner, name, nn.Parameter(torch.zeros(1)))
    state = torch.get_rng_state()
    for name in reversed(makers):
        assert torch.equal(makers[name](), expected[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not tensor.any() for tensor in module.parameters())


def test_meta_tensors_around_real_ones() -> None:
    module = meta(Rows)
    module.child = nn.Linear(3, 3)
    before = module.child.weight.clone()
    torch.manual_seed(7)
    makers = initial_values(module)
    torch.manual_seed(7)
    assert makers.keys() == {"rows", "places"}
    assert torch.equal(makers["rows"](), torch.empty(5, 3).normal_())  # nothing is drawn for the child
    assert torch.equal(module.child.weight, before)


def test_meta_tensors_by_the_models_own_protocol() -> None:
    module = meta(causal_lm("llama"))
    torch.manual_seed(7)
    makers = initial_values(module)
    expected = causal_lm("llama")()
    assert makers.keys() == tensors_of(expected).keys()
    assert torch.equal(makers["model.rotary_emb.inv_freq"](), expected.model.rotary_emb.inv_freq)
    assert torch.equal(makers["lm_head.weight"](), makers["model.embed_tokens.weight"]())
    weight = makers["model.layers.1.mlp.up_proj.weight"]()
    assert abs(weight.std().item() / 0.02 - 1) < 0.05
    assert weight.abs().max() > 0.05  # normal, not uniform


def test_meta_tensors_without_a_way() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    class Half(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(3))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    class Old(nn.Module):
        def __init__(self, *inside: nn.Module) -> None:
            super().__init__()
            self.inside = nn.ModuleList(inside)

        def _initialize_weights(self) -> None:  # of all, not of one
            raise AssertionError

    with pytest.raises(ValueError, match=r"Plain at '0.inside.1' .* no reset_parameters\(\).*empty_init=True"):
        initial_values(meta(lambda: nn.Sequential(Old(nn.Linear(2, 2), Plain()))))
    with pytest.raises(
        ValueError, match=r"Half at '0': places on the meta device got no numbers by reset_parameters\(\)"
    ):
        initial_values(meta(lambda: nn.Sequential(Half())))
