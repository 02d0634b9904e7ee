"""The private names that the project leans on exist and have the form it expects; each test fails when one goes."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.file_baton import FileBaton

from lightning_partrain import compat
from tests.test_numerics import in_group

PACKAGE = Path(compat.__file__).parent


def test_all_of_compat_is_there() -> None:
    for name in compat.__all__:
        assert getattr(compat, name) is not None


def test_only_compat_imports_private_names() -> None:
    private = re.compile(
        r"^\s*(?:from\s+(?:torch|lightning)\S*\._|from\s+(?:torch|lightning)\S*\s+import\s+[^#\n]*\b_\w)", re.MULTILINE
    )
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            assert not private.search(path.read_text()), f"{path.name} imports a private name"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ParallelStrategy, "_configure_launcher"),
        (LightningOptimizer, "_to_lightning_optimizer"),
        (Precision, "_after_closure"),
        (Precision, "_wrap_closure"),
        (nn.Module, "zero_grad"),
        (nn.Module, "_load_from_state_dict"),
        (_CheckpointConnector, "resume_start"),
        (ModelCheckpoint, "_link_checkpoint"),
        (FSDPParam, "_init_sharded_param"),
    ],
)
def test_members_that_are_overridden_or_relied_on(owner: Any, name: str) -> None:
    assert callable(getattr(owner, name))


def test_what_cut_layers_rely_on() -> None:
    """Nested tensors are off by this attribute, and fused attention by any hook."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert nn.TransformerEncoder(layer, 1).use_nested_tensor is True
    assert "_forward_hooks" in inspect.getsource(nn.TransformerEncoderLayer.forward)
    assert nn.MultiheadAttention(8, 2, kdim=4).in_proj_weight is None


def test_what_a_strategy_holds() -> None:
    """Attributes of Lightning's base class that ours reads or sets."""
    from lightning_partrain.strategies import Hybrid3DStrategy

    strategy = Hybrid3DStrategy()
    for name in (
        "_lightning_module",
        "_model",
        "_launcher",
        "_lightning_optimizers",
        "_layer_sync",
        "_precision_plugin",
    ):
        assert hasattr(strategy, name), name
    assert "_device_mesh" in vars(pl.LightningModule())


def test_what_the_metric_agreement_reads() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert isinstance(trainer._logger_connector._callback_metrics, dict)
    assert isinstance(trainer.fit_loop.epoch_loop._results, dict)
    assert hasattr(pl.LightningModule(), "_trainer")
    checkpoint = pl.callbacks.ModelCheckpoint(every_n_train_steps=2)
    assert checkpoint._every_n_train_steps == 2
    assert hasattr(checkpoint, "_train_time_interval")


def test_what_the_first_batch_is_fetched_with() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.test_loop, trainer.predict_loop):
        assert callable(loop.setup_data)
        assert hasattr(loop, "_combined_loader")
    assert hasattr(trainer.fit_loop, "_data_fetcher")
    assert callable(pl.LightningModule._on_before_batch_transfer)
    fetcher = compat.PrefetchDataFetcher()
    assert fetcher.batches == []
    assert fetcher.iterator is None


def test_fsdp2_states_that_a_pipeline_reduces() -> None:
    def check(rank: int) -> bool:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
        compat.fsdp_defer_gradients(model, defer=True)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        taken = compat.fsdp_take_gradients(model)
        assert len(taken) == 4
        assert all(p.grad is None for p in model.parameters())
        assert compat.fsdp_take_gradients(model) == {}
        compat.fsdp_add_gradients(taken)
        compat.fsdp_defer_gradients(model, defer=False)
        compat.fsdp_reduce_gradients(model)
        return all(p.sharded_param.grad is not None for p in compat.fsdp_params(model))

    assert in_group(2, check) == [True, True]


def test_fake_tensors_keep_parameters_and_ties() -> None:
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    param = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    fake = mode.from_tensor(param)
    assert isinstance(fake, nn.Parameter)
    assert not fake.requires_grad
    assert mode.from_tensor(param) is fake
    assert fake.untyped_storage()._cdata == fake.view(-1).untyped_storage()._cdata


def test_what_deferred_tensors_rest_on() -> None:
    """Storages keep their attributes for as long as they live, and operators say what they write, take and draw."""
    tensor = torch.ones(3)
    storage: Any = tensor.untyped_storage()
    storage.mark = "kept"
    del storage
    assert nn.Parameter(tensor).untyped_storage().mark == "kept"  # type: ignore[attr-defined]
    aten = torch.ops.aten
    assert compat.written_arguments(aten.mul_.Tensor, (tensor, 2.0), {}) == [tensor]
    assert compat.written_arguments(aten.mul.Tensor, (tensor, 2.0), {}) == []
    assert compat.written_arguments(aten.add.out, (torch.ones(3), tensor), {"out": tensor}) == [tensor]
    assert compat.takes_device(aten.randn.default)
    assert not compat.takes_device(aten.mul.Tensor)
    for drawing in (
        aten.normal_.default,
        aten.randperm.default,
        aten.native_dropout.default,
        aten.rrelu_with_noise.default,
    ):
        assert torch.Tag.nondeterministic_seeded in drawing.tags


def test_launcher_form() -> None:
    parameters = inspect.signature(compat.SubprocessScriptLauncher.__init__).parameters
    assert list(parameters) == ["self", "cluster_environment", "num_processes", "num_nodes"]
    assert {"launch", "kill"} <= set(dir(compat.SubprocessScriptLauncher))


def test_worker_seeding_takes_a_rank() -> None:
    assert "rank" in inspect.signature(compat.pl_worker_init_function).parameters


def test_optimizer_is_unwrapped() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert compat.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert compat.unwrap_optimizer(optimizer) is optimizer


def test_files_of_torch_save(tmp_path: Path) -> None:
    """Where bytes begin is known without reading them, and tensors are pickled as torch itself does."""
    value = torch.arange(6.0).view(2, 3)
    torch.save(value, tmp_path / "file")
    with compat.FakeTensorMode():
        fake = torch.load(tmp_path / "file", weights_only=True)
    begin = compat.checkpoint_offset(fake)
    assert (tmp_path / "file").read_bytes()[begin : begin + 24] == value.numpy().tobytes()
    for each in (value, value.to(torch.float8_e4m3fn)):
        make, arguments = compat.saved_tensor(each.dtype, (2, 3), lambda kind, count: (kind, count))
        theirs, (storage, *others) = each.__reduce_ex__(2)
        assert (make, list(arguments[1:])) == (theirs, others)
        assert arguments[0][1] == len(storage)


def test_classes_in_the_metadata_of_dcp() -> None:
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in compat.DCP_CLASSES
    assert all(module.startswith("torch.distributed.checkpoint.") for module, _ in compat.DCP_CLASSES)


def test_local_part_shares_storage() -> None:
    def check(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        local = compat.local_part(param)
        local.add_(1)
        return not local.requires_grad and torch.equal(param.full_tensor().detach(), torch.arange(4.0) + 1)

    assert in_group(2, check) == [True, True]


def test_fully_shard_is_undone() -> None:
    """Parameters, class, hooks and registry entries: the module can be used, loaded and sharded again."""

    def check(rank: int) -> Any:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        x = torch.ones(1, 3)
        expected = model(x).detach()
        for _ in range(2):
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            used: set[Any] = set()
            compat.fill_unused_gradients(model[0], used)
            model(x).sum().backward()
            params = compat.fsdp_params(model)
            assert len(params) == 4
            assert len(used) == 2
            assert all(p.sharded_param.grad is not None for p in params)
            compat.fsdp_forget_gradients(model, {params[0].sharded_param})
            assert params[0].sharded_param.grad is None
            gathered, _ = compat.fsdp_gathered(model)
            assert all(t.shape for t in gathered)
            compat.remove_fully_shard(model, lambda param: param.full_tensor())
            assert type(model) is nn.Sequential
            assert type(model[0]) is nn.Linear
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
            model.load_state_dict(before)
            assert not isinstance(model, FSDPModule)
            torch.testing.assert_close(model(x).detach(), expected)
        return "whole"

    assert in_group(2, check) == ["whole"] * 2


def test_files_of_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library, lock = compat.extension_files("op")
    assert (library.parent, library.stem, lock) == (tmp_path / "op", "op", tmp_path / "op" / "lock")
    monkeypatch.setenv("CXX", sys.executable)
    assert compat.extension_compilers()[0] == sys.executable
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compat.extension_compilers()[0] is None
    baton = FileBaton(str(lock))  # it holds the lock open: that tells a live build from a killed one
    assert baton.try_acquire()
    assert os.path.samestat(os.fstat(baton.fd), lock.stat())
    baton.release()
    assert not lock.exists()


def test_which_parameters_a_backward_pass_reaches() -> None:
    used, unused = nn.Linear(2, 1), nn.Linear(2, 1)
    seen: list[bool] = []
    loss = used(torch.ones(2)).sum()
    loss.register_hook(lambda _: seen.extend(compat.is_in_backward(each.weight) for each in (used, unused)))
    loss.backward()
    assert seen == [True, False]


def test_the_step_that_loggers_count() -> None:
    trainer = pl.Trainer(logger=False, barebones=True)
    assert isinstance(inspect.getattr_static(type(trainer._logger_connector), "should_update_logs"), property)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
