"""The examples, each in a small form: its own script, config and preset, a few steps on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from examples import byte_models
from examples.gpt import GPT, GPTModule, StdlibText, Windows, path_hash
from lightning_partrain.lightning_cli import ParallelCLI
from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
SMALL_DATA = {"context": 16, "max_bytes": 100_000, "train_windows_per_epoch": 256, "val_windows": 16}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *_: object) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"])))


def small_gpt(folder: Path, *presets: str) -> list[str]:
    """The command line of the GPT example with everything that takes time made small."""
    small = {
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 16, "warmup_steps": 2},
        "data": {**SMALL_DATA, "batch_size": 4},
        "trainer": {
            "max_steps": 6,
            "val_check_interval": 3,
            "log_every_n_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "", "version": ""},
            },
        },
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    configs = ["examples/gpt.yaml", *presets, str(folder / "small.yaml")]
    return [word for config in configs for word in ("--config", str(ROOT / config))]


@pytest.mark.parametrize(
    "presets",
    [
        (),
        ("strategies/hybrid_3d.yaml",),
        ("strategies/hybrid_3d.yaml", "callbacks/checkpoint.yaml"),
        ("strategies/hybrid_3d_pp2.yaml",),
        ("strategies/hybrid_3d_tp2.yaml",),
        ("strategies/hybrid_3d_tp2_pp2.yaml",),
    ],
)
def test_the_gpt_trains_from_its_config_and_presets(tmp_path: Path, presets: tuple[str, ...]) -> None:
    def run(rank: int) -> tuple[list[float], float, str]:
        losses = Losses()
        cli = ParallelCLI(
            GPTModule,
            StdlibText,
            args=["fit", *small_gpt(tmp_path, *presets), f"--trainer.devices={ranks}"],
            trainer_defaults={"callbacks": losses},
        )
        checkpoint = cli.trainer.checkpoint_callback
        return losses.losses, float(cli.trainer.callback_metrics["val_loss"]), checkpoint.best_model_path

    ranks = 4 if "tp2_pp2" in "".join(presets) else 2
    results = run_ranks(ranks, run)
    losses, val_loss, best = results[0]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert val_loss < losses[0]
    assert results[1][0] == losses
    if presets:
        assert results[1] == results[0]
        assert Path(best).is_file()
        assert ("last.ckpt" in {p.name for p in Path(best).parent.iterdir()}) == (len(presets) == 2)


def test_the_gpt_has_no_word_about_parallelism() -> None:
    text = (ROOT / "examples" / "gpt.py").read_text()
    assert not re.findall(r"world_size|(?:global|local)_rank|distributed|all_reduce|sync_dist|Sampler|DTensor", text)


def test_the_gpt_is_causal() -> None:
    model = GPT(layers=2, width=16, heads=2, context=8)
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_data_are_the_same_windows_each_time_and_the_files_are_apart() -> None:
    first, second = StdlibText(**SMALL_DATA), StdlibText(**SMALL_DATA)
    for data in (first, second):
        data.setup()
    assert torch.equal(first.train_text, second.train_text) and len(first.train_text) == 100_000
    assert len(first.val_text) == 5_000
    for one, two in (
        (first.train_dataloader(), second.train_dataloader()),
        (first.val_dataloader(), second.val_dataloader()),
    ):
        batches = list(zip(one, two, strict=True))
        assert batches
        assert all(torch.equal(a, b) for x, y in batches for a, b in zip(x, y, strict=True))
    whole = bytes(first.train_text.numpy())
    assert all(bytes(first.val_text[i : i + 400].numpy()) not in whole for i in range(0, 4_600, 400))
    hashes = [path_hash(Path(name)) for name in ("a.py", "b/c.py", "json/decoder.py")]
    assert len(set(hashes)) == 3 and all(0 <= h < 1 for h in hashes)


def test_windows_hold_the_next_byte_as_target() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    for windows in (Windows(text, 8, 5), Windows(text, 8, 5, seed=1)):
        assert len(list(zip(range(5), windows, strict=False))) == 5
        for index in range(5):
            inputs, targets = windows[index]
            assert torch.equal(targets, inputs + 1) and len(inputs) == 8
    tiled = Windows(text, 8, 5)
    assert tiled.offset(0) == 0 and tiled.offset(4) == 41


def test_byte_models_order_as_the_text_demands() -> None:
    text = torch.frombuffer(bytearray(b"abcabdabcabd" * 400), dtype=torch.uint8)
    unigram, order_1, order_2 = (byte_models.bits_per_byte(text[:2400], text[2400:], order) for order in range(3))
    assert order_2 < order_1 < unigram < 8
    # after "ab" come c and d in turn, everything else is certain: a third of the bytes cost one bit, less what is uncertain of the rest
    assert order_2 == pytest.approx(1 / 3, abs=0.02)
    for order in range(2):
        sums = byte_models.next_byte_probabilities(text, order).sum(dim=1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
