"""Every way to start ranks, with real scripts: our launcher, torchrun on one and two nodes, SLURM; and how runs end.

Each script imports torch and lightning anew, which is nearly all of the time that these tests take.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_partrain.strategies import Hybrid3DStrategy, failure
from tests.harness import RankFailure, free_port, run_ranks, trainer
from tests.models import CASES, OddSizes
from tests.parity import shares

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 180.0
#: What Lightning or a launcher would take for a running job.
MARKS = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "PL_GLOBAL_SEED")

SCRIPT = """
import os, sys, json
from pathlib import Path
FOLDER = Path(os.environ["FOLDER"])
with open(FOLDER / "runs", "a") as file:
    file.write(f"{os.getpid()}\\n")  # one line for each time that this file is run

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning_partrain


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)

    def training_step(self, batch, batch_idx):
        torch.randn(600, 600) @ torch.randn(600, 600)  # enough for every compute thread that there should be
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader():
    return DataLoader(TensorDataset(torch.arange(16.0).view(16, 1)), batch_size=2)


def trainer(**options):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    defaults = dict(strategy="hybrid_3d", accelerator="cpu", devices=2, max_epochs=1, **quiet)
    return L.Trainer(**{**defaults, **options})


def save(rank, **values):
    (FOLDER / f"rank{rank}.json").write_text(json.dumps({"pid": os.getpid(), "parent": os.getppid(), **values}))


"""


@dataclass
class Ended:
    """How a script ended: its exit code, its output, the seconds it took, and what its ranks saved."""

    code: int
    out: str
    err: str
    seconds: float
    ranks: list[dict[str, Any]]
    runs: int
    left: list[int]


def alive(folder: Path) -> list[int]:
    """Processes that were started for the test in ``folder``, in whatever session they are by now; zombies have no environment."""
    mark = f"FOLDER={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def end(folder: Path) -> None:
    """With the stacks of all threads in the output."""
    for signum, pause in ((signal.SIGABRT, 1.0), (signal.SIGKILL, 0.0)):
        for pid in alive(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        time.sleep(pause)


def start(folder: Path, body: str, command: list[str], **environment: str) -> subprocess.Popen[str]:
    """The script with ``body``, which knows by FOLDER where it belongs, as all its descendants do."""
    script, text = folder / "script.py", SCRIPT + body
    if not script.exists() or script.read_text() != text:  # not anew: a rank that starts meanwhile would read nothing
        script.write_text(text)
    kept = {k: v for k, v in os.environ.items() if k not in MARKS and not k.startswith(("SLURM", "TORCHELASTIC"))}
    kept.pop("OMP_NUM_THREADS", None)
    number = len(list(folder.glob("*.err")))
    with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, str(script)],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "FOLDER": str(folder), "PYTHONFAULTHANDLER": "1", **environment},
            stdout=out,
            stderr=err,
            text=True,
        )


def finish(folder: Path, processes: list[subprocess.Popen[str]]) -> Ended:
    """Wait for all of them, and for what they leave behind; kill what is there after :data:`LIMIT` seconds."""
    began = time.monotonic()
    try:
        codes = [process.wait(max(0.1, began + LIMIT - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        end(folder)
        outputs = "\n".join(path.read_text() for path in sorted(folder.glob("*.[oe]*")))
        pytest.fail(f"not finished after {LIMIT} s\n{outputs}")
    seconds = time.monotonic() - began
    until = time.monotonic() + 3  # the parent's end ends the ranks, a moment later
    while (left := alive(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        end(folder)
    out, err = ("\n".join(path.read_text() for path in sorted(folder.glob(f"*.{kind}"))) for kind in ("out", "err"))
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    runs = len((folder / "runs").read_text().splitlines()) if (folder / "runs").exists() else 0
    return Ended(next((c for c in codes if c), 0), out, err, seconds, ranks, runs, left)


def run(folder: Path, body: str, *command: str, **environment: str) -> Ended:
    return finish(folder, [start(folder, body, list(command), **environment)])


# -- our own launcher --------------------------------------------------------------------------------------------------

ALL_STAGES = """
run, module = trainer(), Module()
run.fit(module, loader(), loader())
run.validate(module, loader())
tested = run.test(module, loader(), verbose=False)
predictions = run.predict(module, loader())
if run.is_global_zero:
    print("this line once", flush=True)
save(
    run.global_rank,
    predictions=[p.tolist() for p in predictions],
    weight=module.layer.weight.tolist(),
    test=tested[0]["test_loss"],
    threads=torch.get_num_threads(),
)
"""


def assert_two_ranks_did_all(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    assert ended.left == []
    first, second = ended.ranks
    assert first["predictions"] == [[0, 2], [4, 6], [8, 10], [12, 14]]
    assert second["predictions"] == [[1, 3], [5, 7], [9, 11], [13, 15]]
    assert first["weight"] == second["weight"] and first["test"] == second["test"]
    assert ended.out.count("this line once") == 1
    assert ended.out.count("val_loss") == 1, ended.out  # the table of metrics


def test_forked_ranks_go_through_all_stages(tmp_path: Path) -> None:
    ended = run(tmp_path, ALL_STAGES)
    assert_two_ranks_did_all(ended)
    assert ended.runs == 1, "the script ran again instead of being forked"
    first, second = ended.ranks
    assert second["parent"] == first["pid"]
    assert (tmp_path / "runs").read_text().strip() == str(first["pid"])


USED_THREADS = """
torch.set_num_threads(2)
big = torch.randn(600, 600, requires_grad=True)
(big @ big).relu().sum().backward()
"""


@pytest.mark.parametrize("threads", [pytest.param("2", marks=pytest.mark.slow), None])
def test_after_computing_with_threads(threads: str | None, tmp_path: Path) -> None:
    """A fork copies no pool of threads. Ranks that need one are started by running the script again; others do without."""
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    ended = run(tmp_path, USED_THREADS + ALL_STAGES, **environment)
    assert_two_ranks_did_all(ended)
    per_rank = int(threads) if threads else max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.runs == (1 if per_rank == 1 else 2)
    assert [rank["threads"] for rank in ended.ranks] == [per_rank if per_rank == 1 else 2] * 2


REASONS = """
import threading
import lightning_partrain.native_threads
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_partrain.strategies.launcher import RankLauncher


def why(threads, device="cpu"):
    os.environ["OMP_NUM_THREADS"] = threads
    return RankLauncher(LightningEnvironment(), 2, 1, torch.device(device), lambda: None).why_not_fork()


reasons = {"nothing": why("1"), "nothing with threads": why("2"), "gpu": why("1", "cuda")}
release = threading.Event()
thread = threading.Thread(target=release.wait)
thread.start()
reasons["python"] = why("1")
release.set()
thread.join()
torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)
reasons |= {"pool": why("2"), "pool that is not used": why("1")}
save(0, **reasons)
"""


def test_the_reasons_not_to_fork(tmp_path: Path) -> None:
    ended = run(tmp_path, REASONS)
    assert ended.code == 0, ended.err
    reasons = ended.ranks[0]
    assert reasons["nothing"] is reasons["nothing with threads"] is reasons["pool that is not used"] is None
    assert "accelerator" in reasons["gpu"] and "Python threads" in reasons["python"] and "compute" in reasons["pool"]


# -- failures ------------------------------------------------------------------------------------------------------------

FAILS = """
WHERE, RANK = os.environ["WHERE"].split(",")


class Failing(Module):
    def fail(self, where):
        if where == WHERE and self.global_rank == int(RANK):
            raise LookupError(f"broken on purpose in {where}")

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fail("validation_step")
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self):
        self.fail("train_dataloader")
        return loader()

    def val_dataloader(self):
        return loader()


import time
began = time.time()
try:
    trainer().fit(Failing())
finally:
    (FOLDER / f"seconds{os.environ['LOCAL_RANK']}").write_text(str(time.time() - began))
"""


@pytest.mark.parametrize(
    "where",
    [
        "training_step,1",
        "train_dataloader,1",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("training_step,0", "validation_step,1", "validation_step,0")
        ),
    ],
)
def test_the_failure_of_one_rank_comes_first_and_ends_all(where: str, tmp_path: Path) -> None:
    hook, rank = where.split(",")
    ended = run(tmp_path, FAILS, WHERE=where)
    message = f"LookupError: broken on purpose in {hook}"
    assert ended.code != 0
    assert ended.left == [], "ranks are left behind"
    first, _, rest = ended.err.partition("Traceback")
    assert f"[rank {rank}: dp_shard {rank}] failed first:" in first, ended.err
    assert message in rest.partition("Traceback")[0], ended.err  # the first traceback of all
    assert ended.err.count("failed first:") == 1, ended.err
    if rank == "1":
        assert f"Stopped because rank 1 (dp_shard 1) failed with {message}" in ended.err
    fitting = min(float(path.read_text()) for path in tmp_path.glob("seconds*"))
    assert fitting < 20


AFTER = """
import time
run, module = trainer(), Module()
run.fit(module, loader())
if run.global_rank == 1:
    time.sleep(2)
    if os.environ.get("FAIL"):
        raise LookupError("broken on purpose at the end")
save(run.global_rank)
"""


def test_the_parent_waits_for_the_end_of_every_script(tmp_path: Path) -> None:
    ended = run(tmp_path, AFTER)
    assert ended.code == 0 and len(ended.ranks) == 2 and ended.left == [], ended.err


def test_a_rank_that_fails_last_is_not_overlooked(tmp_path: Path) -> None:
    ended = run(tmp_path, AFTER, FAIL="1")
    assert ended.code == 1 and len(ended.ranks) == 1 and ended.left == []
    assert "broken on purpose at the end" in ended.err


ENDS_ALONE = """
import signal, time
from lightning_partrain.strategies import failure, launcher
failure._GRACE_SECONDS = launcher.GRACE_SECONDS = 2.0


class Ends(Module):
    def training_step(self, batch, batch_idx):
        how, rank = os.environ["HOW"].split(",")
        if batch_idx == 1 and self.global_rank == int(rank):
            if how == "raises":
                raise LookupError("broken on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 1:
            time.sleep(60)  # busy elsewhere: no collective will tell it
        return super().training_step(batch, batch_idx)


trainer().fit(Ends(), loader())
"""


@pytest.mark.parametrize("how", ["raises,1", pytest.param("is killed,1", marks=pytest.mark.slow), "is killed,0"])
def test_nobody_survives_a_rank_that_ends_alone(how: str, tmp_path: Path) -> None:
    ended = run(tmp_path, ENDS_ALONE, HOW=how)
    assert ended.left == [] and ended.seconds < 40
    if how == "raises,1":
        assert ended.code == 1
        assert ended.err.index("[rank 1: dp_shard 1] failed first:") < ended.err.index("[rank 0] stops: rank 1")
    else:
        assert ended.code == (128 + signal.SIGKILL if how == "is killed,1" else -signal.SIGKILL)


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_needs_a_launcher_to_learn_of_a_failure(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that nobody watches, and that no collective wakes up."""
    monkeypatch.setattr(failure, "_GRACE_SECONDS", 1.0)

    class Busy(OddSizes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == failing:
                raise LookupError("broken on purpose")
            time.sleep(60)

    def each(rank: int) -> None:
        data = CASES["odd"].data(torch.float32)
        trainer(Hybrid3DStrategy(), 2).fit(Busy(), shares(data, rank, 2))

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, each, 30)
    assert caught.value.codes == [1, 1] and caught.value.seconds < 15
    told = f"[rank {1 - failing}] stops: rank {failing} (dp_shard {failing}) failed with LookupError: broken on purpose"
    assert told in caught.value.reports[1 - failing]


def test_a_run_after_one_that_failed_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks may be out of step. Nobody hangs, and what watched the first run ends nobody in the second."""
    monkeypatch.setattr(failure, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(failure, "_GRACE_SECONDS", 0.2)

    class Trial(OddSizes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("pruned")

    def each(rank: int) -> str:
        loader = shares(CASES["odd"].data(torch.float32), rank, 2)
        with pytest.raises(LookupError):
            trainer(Hybrid3DStrategy(), 2).fit(Trial(), loader)
        with pytest.raises(RuntimeError) as caught:
            trainer(Hybrid3DStrategy(), 2).fit(OddSizes(), loader)
        time.sleep(0.5)
        return str(caught.value)

    for message in run_ranks(2, each, 30):
        assert "An earlier run" in message and "LookupError: pruned" in message and "Start the script again" in message


# -- other launchers -----------------------------------------------------------------------------------------------------

FOUR_SAMPLERS = """
class Different(Module):
    def setup(self, stage):  # before the strategy takes the weights: those of rank 0 must win
        if stage == "fit":
            torch.nn.init.constant_(self.layer.weight, self.global_rank + 1.0)

    def on_train_start(self):
        self.start = self.layer.weight.tolist()


run, module = trainer(num_nodes=int(os.environ.get("NODES", 1))), Different()
run.fit(module, loader(), loader())
sampler = run.train_dataloader.sampler
predictions = run.predict(module, loader())
save(
    run.global_rank,
    replicas=sampler.num_replicas,
    replica=sampler.rank,
    local_rank=run.local_rank,
    node_rank=run.node_rank,
    world_size=run.world_size,
    start=module.start,
    weight=module.layer.weight.tolist(),
    predictions=[x for p in predictions for x in p.tolist()],
)
"""


def assert_ranks(ended: Ended, nodes: int, devices: int, runs: int | None = None) -> None:
    world = nodes * devices
    assert ended.code == 0, ended.err
    assert ended.left == []
    assert len(ended.ranks) == world and ended.runs == (runs or world), ended.err
    for rank, saved in enumerate(ended.ranks):
        assert (saved["node_rank"], saved["local_rank"]) == divmod(rank, devices)
        assert saved["world_size"] == saved["replicas"] == world and saved["replica"] == rank
        assert saved["start"] == [[1.0], [1.0]] and saved["weight"] == ended.ranks[0]["weight"] != saved["start"]
        assert saved["predictions"] == list(range(rank, 16, world))


@pytest.mark.slow
def test_torchrun_on_one_node(tmp_path: Path) -> None:
    ended = run(tmp_path, FOUR_SAMPLERS, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert_ranks(ended, nodes=1, devices=2)


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    two_nodes = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    two_nodes += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = [
        start(
            tmp_path,
            FOUR_SAMPLERS,
            [*two_nodes, f"--node-rank={node}"],
            NODES="2",
        )
        for node in range(2)
    ]
    assert_ranks(finish(tmp_path, nodes), nodes=2, devices=2)


def test_slurm(tmp_path: Path) -> None:
    port = str(free_port())
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}
    job |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "MASTER_PORT": port, "NODES": "2"}
    tasks = [
        start(
            tmp_path,
            FOUR_SAMPLERS,
            [],
            **job,
            SLURM_PROCID=str(rank),
            SLURM_NODEID=str(rank // 2),
            SLURM_LOCALID=str(rank % 2),
        )
        for rank in range(4)
    ]
    assert_ranks(finish(tmp_path, tasks), nodes=2, devices=2)


def test_our_launcher_on_two_nodes(tmp_path: Path) -> None:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODES": "2"}
    nodes = [start(tmp_path, FOUR_SAMPLERS, [], **job, NODE_RANK=str(node)) for node in range(2)]
    assert_ranks(finish(tmp_path, nodes), nodes=2, devices=2, runs=2)
