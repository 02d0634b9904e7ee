"""The first batch of the loaders in use, before the model is laid out: a pipeline is cut by looking at a step."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_partrain.strategies.loaders import StartedLoader

Step = tuple[str, tuple[Any, ...]]


def first_steps(trainer: Trainer) -> list[Step]:
    """Name and arguments of the first call of every step function that this run of ``trainer`` will make.

    Loaders are set up as Lightning would a moment later; random states are kept, and the batch that is looked at is the first
    one that training gets.
    """
    with isolate_rng():
        return list(_first_steps(trainer))


def _first_steps(trainer: Trainer) -> Iterator[Step]:
    module = trainer.lightning_module
    if trainer.state.fn == TrainerFn.FITTING:
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "training_step takes dataloader_iter and fetches its own batches, which a pipeline cannot cut. Take batch and batch_idx."
            )
        batch = _first_of_training(trainer)
        if batch is not None:
            arguments = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
            yield "training_step", (_moved(trainer, batch, 0), *arguments)
        if trainer.enable_validation:
            yield from _of_evaluation(trainer, trainer.fit_loop.epoch_loop.val_loop, "validation_step")
    elif trainer.state.fn == TrainerFn.PREDICTING:
        yield from _of_evaluation(trainer, trainer.predict_loop, "predict_step")
    else:
        testing = trainer.state.fn == TrainerFn.TESTING
        loop = trainer.test_loop if testing else trainer.validate_loop
        yield from _of_evaluation(trainer, loop, "test_step" if testing else "validation_step")


def _first_of_training(trainer: Trainer) -> Any:
    loop = trainer.fit_loop
    loop.setup_data()
    fetcher: Any = loop._data_fetcher
    if fetcher is None or loop.max_batches == 0:
        return None
    if fetcher.batches:  # of unknown length: Lightning is one batch ahead itself
        batch = fetcher.batches[0]
    else:
        batch = next(fetcher.iterator, None)
        if batch is not None:
            fetcher.iterator = _again(batch, fetcher.iterator)
    if trainer.ckpt_path is not None:
        loop._combined_loader = None  # the position in the loader is restored later, into a loader set up again
    return None if batch is None else batch[0]


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """``first`` and then ``rest``, of which ``iter`` is not called again: Lightning's would start anew."""
    yield first
    while (item := next(rest, None)) is not None:
        yield item


def _of_evaluation(trainer: Trainer, loop: Any, name: str) -> Iterator[Step]:
    module = trainer.lightning_module
    if name != "predict_step" and not is_overridden(name, module):
        return
    loop.setup_data()
    if loop._combined_loader is None:
        return
    loop.__dict__["setup_data"] = lambda: loop.__dict__.pop("setup_data", None)  # once is enough
    step = getattr(module, name)
    loaders = list(loop._combined_loader.flattened)
    for index, loader in enumerate(loaders):
        iterator = iter(loader)
        batch = next(iterator, None)
        if batch is None:
            continue
        if not isinstance(loader, Sized) or has_iterable_dataset(loader):
            loaders[index] = StartedLoader(loader, batch, iterator)
        arguments: tuple[Any, ...] = ()
        if is_param_in_hook_signature(step, "batch_idx", min_args=2):
            arguments = (0,)
        if len(loaders) > 1:
            arguments = (0, index)
        yield name, (_moved(trainer, batch, index), *arguments)
    loop._combined_loader.flattened = loaders


def _moved(trainer: Trainer, batch: Any, loader: int) -> Any:
    """``batch`` as the step gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=loader)
