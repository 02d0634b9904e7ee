"""`lightning-partrain convert` of directories that DeepSpeed's engine wrote: all stages go on in one plain process, and nothing is run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_partrain.checkpoint import deepspeed_flat, deepspeed_folder, full, torch_file
from lightning_partrain.cli import main
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

# ---------------------------------------------------------------------------------------------------------------------
# Directories
# ---------------------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """Odd sizes, a tied weight, a frozen parameter, a buffer; two groups, the second of which is earlier in the module."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups = groups
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.body[0].bias.requires_grad_(False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(7.0))
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.head(self.body(self.embed(tokens))) - self.shift).square().mean()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        if self.groups == 1:
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW([{"params": params[1:]}, {"params": params[:1], "lr": 0.01}], lr=0.03)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


STEPS, BATCH = 3, 8


def data() -> Tensor:
    return torch.randint(0, 7, (STEPS * BATCH,), generator=torch.Generator().manual_seed(1))


def fit(strategy: Any, folder: Path, resume: Path | None = None, net: Net | None = None, **options: Any) -> list[float]:
    """Losses of two epochs, or of the second; what the first left is in ``folder / "epoch=0.ckpt"``."""
    module, saving = net or Net(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    options = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": 2, **options}
    trainer(strategy, 1, **options).fit(module, DataLoader(data(), batch_size=BATCH), ckpt_path=resume)
    return module.losses


CASES: dict[str, dict[str, Any]] = {
    "0": {"zero_optimization": {"stage": 0}},
    "1": {"zero_optimization": {"stage": 1}},
    "round robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "2": {"zero_optimization": {"stage": 2}},
    "3": {"zero_optimization": {"stage": 3, "sub_group_size": 12}},
    "1 bf16": {  # DeepSpeed has an optimizer of its own for this
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "3 bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "one group": {"zero_optimization": {"stage": 2}},
}


def write(rank: int, folder: Path, name: str, config: dict[str, Any], client: dict[str, Any]) -> dict[str, Any]:
    """One epoch of DeepSpeed's engine, and what DeepSpeed itself says of what it has saved."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    net = Net(groups=1 if name == "one group" else 2)
    made = net.configure_optimizers()
    (optimizer,), schedulers = made if isinstance(made, tuple) else ([made], [])
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": BATCH // 2,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # it clips to 1 unless it is told not to
            **config,
        },
    )
    for batch in data().view(STEPS, 2, -1)[:, rank]:
        engine.backward(engine(batch))
        engine.step()
    for scheduler, saved in zip(schedulers, client["lr_schedulers"], strict=False):
        for _ in range(saved["last_epoch"]):
            scheduler.step()
    plain = name == "one group"
    engine.save_checkpoint(
        str(folder / name), client_state={"mine": 3} if plain else client, tag=None if plain else "checkpoint"
    )
    trained = [(key, param) for key, param in net.named_parameters() if param.requires_grad]
    averages, weights = {}, {}
    if name in ("3", "1 bf16", "3 bf16"):  # in stages 1 and 2 it finds nothing of a second group (0.19.8)
        averages = {key: safe_get_full_optimizer_state(param, "exp_avg_sq").clone() for key, param in trained}
    if name == "1 bf16":  # which zero_to_fp32 does not read
        weights = {key: value.clone() for key, value in net.state_dict().items()}
        weights.update({key: safe_get_full_fp32_param(param).clone() for key, param in trained})
        weights["head.weight"] = weights["embed.weight"]
    elif rank == 0 and name != "0":
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
        weights = {key: value.clone() for key, value in weights.items()}
    engine.destroy()
    return {"weights": weights, "averages": averages}


def start(rank: int, ranks: int) -> None:
    """Let this process be one of DeepSpeed's."""
    os.environ.update(RANK=str(rank), DS_ACCELERATOR="cpu")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo does without
    deepspeed.init_distributed("gloo", verbose=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Any]]:
    """Directories by the names of :data:`CASES`, losses of the epoch that comes next, and what DeepSpeed says is in them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    (losses,) = run_ranks(1, lambda rank: fit("auto", folder))
    client = torch.load(folder / "epoch=0.ckpt", weights_only=True)
    client = {key: value for key, value in client.items() if key not in ("state_dict", "optimizer_states")}

    def engine(rank: int) -> dict[str, Any]:
        start(rank, 2)
        return {name: write(rank, folder, name, config, client) for name, config in CASES.items()}

    said, _ = run_ranks(2, engine, timeout=40)
    return folder, losses[STEPS:], said


def converted(source: Path, target: Path, to: str = "full", *options: str) -> Path:
    assert main(["convert", str(source), str(target), "--to", to, *options]) == 0
    return target


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# What comes out
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0", "1", "round robin", "2", "3"])
def test_goes_on_in_one_plain_process(made: Any, tmp_path: Path, name: str) -> None:
    folder, expected, _ = made
    file = converted(folder / name, tmp_path / "one.ckpt")
    assert fit("auto", tmp_path, resume=file) == pytest.approx(expected, rel=1e-5)


def test_goes_on_with_our_strategies(made: Any, tmp_path: Path) -> None:
    folder, expected, _ = made
    target = converted(
        folder / "3" / "checkpoint", tmp_path / "target", "sharded"
    )  # the folder in the directory will do
    (losses,) = run_ranks(1, lambda rank: fit(Hybrid3DStrategy(), tmp_path, resume=target))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks(tmp_path: Path, ranks: int) -> None:
    """On one there is nothing to put together, on three nothing is even; parameters that begin at multiples of 16 bytes."""
    aligned = {"stage": 1, "round_robin_gradients": True, "parameter_alignment": True}

    def engine(rank: int) -> None:
        import deepspeed

        start(rank, ranks)
        for name, zero in (("aligned", aligned), ("3", {"stage": 3})):
            net = Net()
            config = {
                "train_micro_batch_size_per_gpu": 24 // ranks,
                "gradient_clipping": 0.0,
                "zero_optimization": zero,
            }
            engine, *_ = deepspeed.initialize(model=net, optimizer=net.configure_optimizers()[0][0], config=config)
            for _ in range(STEPS):
                engine.backward(engine(data().view(ranks, -1)[rank]))
                engine.step()
            engine.save_checkpoint(str(tmp_path / name))
            engine.destroy()

    run_ranks(ranks, engine)
    net = Net()
    ((optimizer,), _) = net.configure_optimizers()
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(data()).backward()
        optimizer.step()
    for name in ("aligned", "3"):
        found = loaded(converted(tmp_path / name, tmp_path / f"{name}.ckpt"))
        torch.testing.assert_close(dict(found["state_dict"]), dict(net.state_dict()))
        torch.testing.assert_close(found["optimizer_states"][0]["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "0"])
def test_is_what_deepspeed_says(made: Any, tmp_path: Path, name: str) -> None:
    """Bit by bit: float32 parameters, ties, what is frozen, buffers, and the optimizer's state."""
    folder, _, said = made
    found = loaded(converted(folder / name, tmp_path / "one.ckpt"))
    weights, expected = found["state_dict"], said[name]["weights"]
    assert list(weights) == list(Net().state_dict())
    assert weights.keys() - expected.keys() == (
        {"body.0.bias"} if name == "1" else set()
    )  # frozen: zero_to_fp32 forgets it
    assert torch.equal(weights["body.0.bias"].float(), Net().body[0].bias.to(weights["body.0.bias"].dtype).float())
    for key, value in expected.items():
        assert torch.equal(weights[key].float(), value.float()) and weights[key].shape == value.shape, key
        assert weights[key].dtype == torch.float32 or key in ("body.0.bias", "shift")  # of these is no copy
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    ((names,), (optimizer,)) = found[full.KEY]["optimizer_parameters"], found["optimizer_states"]
    flat = [each for group in names for each in group]
    assert [group["params"] for group in optimizer["param_groups"]] == (
        [[0, 1, 2, 3, 4]] if len(names) == 1 else [[0, 1, 2, 3], [4]]
    )
    trained = [key for key, param in Net().named_parameters() if param.requires_grad]
    assert flat == (trained if len(names) == 1 else [*trained[1:], trained[0]])
    averages = {flat[number]: state.get("exp_avg_sq") for number, state in optimizer["state"].items()}
    for key, value in said[name]["averages"].items():
        assert torch.equal(averages[key], value), key


def test_no_more_is_read_at_once_than_a_parameter(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    before = torch_file.Records._read

    def read(self: Any, *arguments: Any) -> Tensor:
        tensor = before(self, *arguments)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch_file.Records, "_read", read)
    for name, part in (("one group", 35), ("3 bf16", 18)):  # flat tensors have more
        sizes.clear()
        converted(made[0] / name, tmp_path / f"{name}.ckpt")
        assert max(sizes) <= part and len(sizes) > 12


def test_a_directory_without_lightning(made: Any, tmp_path: Path) -> None:
    found = loaded(file := converted(made[0] / "one group", tmp_path / "one.ckpt"))
    assert found["global_step"] == STEPS and found["client_state"] == {"mine": 3}
    assert found["optimizer_states"][0]["state"].keys() == set(range(5))
    losses = fit("auto", tmp_path, resume=file, net=Net(groups=1), max_epochs=1)
    assert len(losses) == STEPS and losses[0] < Net()(data()).item()
    weights = load_file(converted(made[0] / "one group", tmp_path / "weights", "safetensors"))
    assert torch.equal(weights["embed.weight"], found["state_dict"]["embed.weight"])


def test_frozen_parameters_in_the_optimizer(made: Any, tmp_path: Path, capsys: Any) -> None:
    converted(made[0] / "one group", tmp_path / "without.ckpt")
    assert "1 frozen parameters are not in the optimizer's groups" in capsys.readouterr().out
    found = loaded(converted(made[0] / "one group", tmp_path / "with.ckpt", "full", deepspeed_folder.FROZEN))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert found[full.KEY]["optimizer_parameters"] == [[[name for name, _ in net.named_parameters()]]]
    frozen = net.body[0].bias
    assert all((param in optimizer.state) == (param is not frozen) for param in net.parameters())
    said = refused(made[0] / "2", tmp_path / "no.ckpt", capsys, deepspeed_folder.FROZEN)
    assert "2 groups" in said and "require gradients" in said
    said = refused(tmp_path / "with.ckpt", tmp_path / "no.ckpt", capsys, deepspeed_folder.FROZEN)
    assert "goes with a folder of DeepSpeed's" in said


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def refused(source: Path, target: Path, capsys: Any, *options: str, to: str = "full") -> str:
    capsys.readouterr()
    assert main(["convert", str(source), str(target), "--to", to, *options]) == 1
    assert not target.exists()
    return capsys.readouterr().err


@pytest.fixture
def copy(made: Any, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[0] / name, tmp_path / "source"))


OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("name", ["1", "3", "1 bf16"])
def test_a_rank_s_file_is_missing_or_one_too_many(copy: Any, tmp_path: Path, capsys: Any, name: str) -> None:
    source = copy(name)
    kind = "bf16_" if "bf16" in name else ""
    for rank in (0, 1):
        file = source / "checkpoint" / (kind + OPTIMIZER.format(rank))
        file.rename(tmp_path / "aside")
        said = refused(source, tmp_path / "target", capsys)
        assert f"written by 2 ranks, and {file.name} is missing" in said
        (tmp_path / "aside").rename(file)
    extra = source / "checkpoint" / (kind + OPTIMIZER.format(2))
    shutil.copy(file, extra)
    assert extra.name in refused(source, tmp_path / "target", capsys)
    extra.unlink()
    module = sorted((source / "checkpoint").glob("*model_states.pt"))[-1]
    module.unlink()
    said = refused(source, tmp_path / "target", capsys)
    assert module.name in said and "is missing" in said


def test_tags(copy: Any, tmp_path: Path, capsys: Any) -> None:
    """The folder that is meant is not there, not named, or elsewhere; or a file is given."""
    source = copy("3")
    for file in (source / "latest", source / "checkpoint" / OPTIMIZER.format(1)):
        assert f"one file of a checkpoint of DeepSpeed's. Give the folder: {source}." in refused(
            file, tmp_path / "t", capsys
        )
    for tag in ("global_step9", "..", ""):
        (source / "latest").write_text(tag)
        assert f"names {tag!r}, which is no folder" in refused(source, tmp_path / "t", capsys)
    (source / "latest").unlink()
    assert "no file 'latest'" in (said := refused(source, tmp_path / "t", capsys)) and "There is: checkpoint." in said


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_00-model_00-model_states.pt", "PipelineModule"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture of experts"),
        ("offloaded_tensors/rank0", "NVMe"),
        ("zero/embed.weight", "universal"),
    ],
)
def test_other_kinds(copy: Any, tmp_path: Path, capsys: Any, name: str, what: str) -> None:
    source = copy("2")
    (source / "checkpoint" / name).parent.mkdir(exist_ok=True)
    (source / "checkpoint" / name).touch()
    assert what in refused(source, tmp_path / "target", capsys)


def change(file: Path, how: Callable[[Any], None]) -> None:
    """Write a file of DeepSpeed's anew."""
    import deepspeed.runtime.fp16.loss_scaler  # noqa: F401  (what the file refers to)

    value = torch.load(file, weights_only=False)
    how(value)
    torch.save(value, file)


def test_files_that_do_not_fit_each_other(copy: Any, tmp_path: Path, capsys: Any) -> None:
    source = copy("2")
    tag = source / "checkpoint"
    second = tag / OPTIMIZER.format(1)
    before = second.read_bytes()

    def another_step(value: Any) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1

    def shorter(value: Any) -> None:
        groups = value["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0].detach()[:-1].clone()

    def elastic(value: Any) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"] = [{}, {}]

    def by_rows(value: Any) -> None:
        state = value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg_sq"] = state["exp_avg_sq"][:2].clone()

    for how, words in (
        (another_step, "different steps"),
        (shorter, "ranks' partitions of group 0"),
        (by_rows, "'exp_avg_sq' has shape (2,)"),
    ):
        change(second, how)
        assert words in refused(source, tmp_path / "target", capsys)
        second.write_bytes(before)
    first = (tag / OPTIMIZER.format(0)).read_bytes()
    change(tag / OPTIMIZER.format(0), elastic)
    assert "--to safetensors" in refused(source, tmp_path / "target", capsys)
    converted(source, tmp_path / "weights", "safetensors")
    (tag / OPTIMIZER.format(0)).write_bytes(first)
    second.write_bytes(before[:-200])
    assert second.name in refused(source, tmp_path / "target", capsys)
    at = before.index(loaded_flat(second, before).numpy().tobytes()) + 1
    second.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    assert "has changed" in refused(source, tmp_path / "target", capsys)


def loaded_flat(file: Path, data: bytes) -> Tensor:
    file.write_bytes(data)
    value = deepspeed_flat.File(file)
    return value.unread(value.value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]).read()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_run(copy: Any, tmp_path: Path, capsys: Any) -> None:
    source = copy("2")
    file, ran = source / "checkpoint" / "mp_rank_00_model_states.pt", tmp_path / "ran"
    change(file, lambda value: value.update(hyper_parameters={"where": [Path("x")]}))
    said = refused(source, tmp_path / "target", capsys)
    assert file.name in said and "PosixPath in hyper_parameters/where" in said and "save_hyperparameters" in said
    converted(source, tmp_path / "weights", "safetensors")
    for place in (file, source / "checkpoint" / OPTIMIZER.format(1)):
        before = place.read_bytes()
        change(place, lambda value: value.update(more=Touch(ran)))
        assert not ran.exists()
        main(["convert", str(source), str(tmp_path / "w"), "--to", "safetensors", "--force"])
        assert not ran.exists()
        place.write_bytes(before)


def test_steps_that_deepspeed_s_optimizers_count(made: Any, copy: Any, tmp_path: Path) -> None:
    """In plain numbers, in the state or in the groups."""
    source = copy("2")
    expected = loaded(converted(source, tmp_path / "expected.ckpt"))["optimizer_states"][0]
    for in_groups in (False, True):

        def how(value: Any, in_groups: bool = in_groups) -> None:
            base = value["optimizer_state_dict"]["base_optimizer_state"]
            for number, group in enumerate(base["param_groups"]):
                base["state"][number]["step"] = STEPS
                if in_groups:
                    group["step"] = base["state"][number].pop("step")

        for rank in (0, 1):
            change(source / "checkpoint" / OPTIMIZER.format(rank), how)
        found = loaded(converted(source, tmp_path / "found.ckpt", "full", "--force"))["optimizer_states"][0]
        assert found["param_groups"] == expected["param_groups"]
        steps = [state["step"] for state in found["state"].values()]
        assert all(torch.equal(step, torch.tensor(3.0)) for step in steps)
        assert len({step.data_ptr() for step in steps}) == len(steps)


def test_the_order_of_an_optimizer_s_parameters() -> None:
    module = list("abcdefg")
    for ranks in (1, 2, 3, 4):
        for count in range(1, 8):
            given = module[:count]
            dealt = [given[index] for rank in range(ranks) for index in range(rank, count, ranks)]
            assert deepspeed_flat.as_given(dealt, ranks, True, module) == given
            assert deepspeed_flat.as_given(dealt, ranks, None, module) == given
            assert deepspeed_flat.as_given(given, ranks, False, module) == given
    with pytest.raises(ValueError, match="round_robin_gradients"):
        deepspeed_flat.as_given(list("cab"), 2, None, module)


@pytest.mark.parametrize("part", ["", "latest"])
def test_given_as_ckpt_path_it_says_what_to_do(copy: Any, part: str) -> None:
    """The directory, or a file in it."""
    source = copy("1")

    def run(rank: int) -> None:
        training = trainer(Hybrid3DStrategy(), 2)
        training.fit(Net(), DataLoader(torch.zeros(4, 2, dtype=torch.long)), ckpt_path=str(source / part))

    with pytest.raises(RankFailure) as failure:
        run_ranks(2, run)
    words = f"was written by DeepSpeed. Make a checkpoint of it first: lightning-partrain convert {source} NEW"
    assert all(words in report for report in failure.value.reports)
