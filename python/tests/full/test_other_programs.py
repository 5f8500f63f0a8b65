"""Tests programs that were written for other trackers: Lightning and transformers log through MLflow's client, and
W&B's examples through this package. Needs Debian's PyTorch and Python: `bash tests/run full` installs everything.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_mlflow import ROOT, server

import lockstep

# The fixture of test_mlflow starts a server for this module, too.
__all__ = ["server"]

# Trains Lightning's demo model on its demo data, with its loggers for MLflow and CSV and its learning rate monitor.
LIGHTNING = """
import sys, types

# Replaces a module for models of several processes, which Debian's Python cannot import from Debian's PyTorch.
shared = types.ModuleType("torch.distributed._shard.sharded_tensor")
shared.pre_load_state_dict_hook = shared.state_dict_hook = lambda *_: None
sys.modules[shared.__name__] = shared

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

class LitModel(BoringModel):
    def __init__(self, depth=3):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train_loss", step["loss"])
        return step

    def validation_step(self, batch, batch_idx):
        step = super().validation_step(batch, batch_idx)
        self.log("val/loss", step["x"])
        return step

L.seed_everything(7)
logger = MLFlowLogger(experiment_name="lightning_logs", run_name="boring", tags={"team": "vision"}, log_model=True)
trainer = L.Trainer(
    logger=[logger, CSVLogger(".", name="", version="")], callbacks=[LearningRateMonitor()], max_epochs=3,
    limit_train_batches=20, log_every_n_steps=5, enable_progress_bar=False,
)
trainer.fit(LitModel(), datamodule=BoringDataModule())
"""

# The Trainer adds its callback for MLflow. The network is created from its settings, so nothing is downloaded.
TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input_ids": torch.arange(index, index + 8) % 50, "labels": torch.tensor(index % 2)}

config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
args = TrainingArguments(
    "out", run_name="tiny bert", report_to="mlflow", num_train_epochs=2, per_device_train_batch_size=8,
    logging_steps=2, eval_strategy="epoch", save_steps=8, learning_rate=1e-3, use_cpu=True,
)
trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=Sentences(), eval_dataset=Sentences())
trainer.train()
trainer.save_state()
"""


@pytest.fixture(autouse=True)
def environment(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names the server in the variables of these programs, and changes to an empty folder."""
    for client, name in (("MLFLOW", "TRACKING_URI"), ("LOCKSTEP", "SERVER")):
        monkeypatch.setenv(f"{client}_{name}", server[0])
    for name in ("MLFLOW_TRACKING_TOKEN", "LOCKSTEP_TOKEN"):
        monkeypatch.setenv(name, server[1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def run_script(script: str, project: str, name: str) -> lockstep.Job:
    """Runs a script, and returns its run."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [job] = [job for job in lockstep.Client().jobs(project=project) if job.name == name]
    assert job.state == "succeeded"
    return job


def stored_points(job: lockstep.Job) -> dict[str, list[tuple[int, Any]]]:
    """Returns every stored point of every metric."""
    series: dict[str, list[tuple[int, Any]]] = {}
    text = job._send_once("GET", f"/jobs/{job.id}/metrics.csv").text
    for row in csv.DictReader(text.splitlines()):
        series.setdefault(row["name"], []).append((int(row["step"]), pytest.approx(float(row["value"]))))
    return series


def sizes(job: lockstep.Job) -> dict[str, int]:
    return {file["path"]: file["size_bytes"] for file in job.files()}


def test_lightning_logs_through_mlflow() -> None:
    job = run_script(LIGHTNING, "lightning_logs", "boring")
    rows = list(csv.DictReader(Path("metrics.csv").read_text().splitlines()))
    series = stored_points(job)
    for name in ("train_loss", "val/loss", "lr-SGD"):
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        assert len(points) >= 3 and points == series[name], name
    external = job.data["external"]
    assert external["config"] == {"depth": "3"} and external["values"]["team"] == "vision"
    [checkpoint] = Path().rglob("*.ckpt")
    stored, folder = sizes(job), f"model/checkpoints/{checkpoint.stem}"
    assert stored.keys() == {f"{folder}/{name}" for name in (checkpoint.name, "metadata.yaml", "aliases.txt")}
    assert stored[f"{folder}/{checkpoint.name}"] == checkpoint.stat().st_size


def test_transformers_logs_through_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "glue")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "text"}')
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    job = run_script(TRANSFORMERS, "glue", "tiny bert")
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    series = stored_points(job)
    for name, steps in [("loss", [2, 4, 6, 8]), ("learning_rate", [2, 4, 6, 8]), ("eval_loss", [4, 8])]:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        assert [step for step, _ in points] == steps and points == series[name], name
    external = job.data["external"]
    assert (external["config"]["learning_rate"], external["config"]["hidden_size"]) == ("0.001", "16")
    assert external["values"]["team"] == "text"
    # The model is stored in MLflow's format, which contains the checkpoint.
    stored, weights = sizes(job), "checkpoint-8/model.safetensors"
    assert "checkpoint-8/MLmodel" in stored
    assert stored[f"checkpoint-8/artifacts/{weights}"] == Path("out", weights).stat().st_size


def examples(file: str, *documented: str) -> list[str]:
    """Returns the examples of these calls in W&B's documentation, which is generated from the package's comments."""
    found = []
    for node in ast.walk(ast.parse((ROOT / "target/wandb/wandb/sdk" / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in documented:
            found += re.findall(r"```python\n(.*?)```", ast.get_docstring(node) or "", re.DOTALL)
    return found


def test_wandb_examples_run_with_another_import() -> None:
    paths = ["these/are/myfiles/a.txt", "files/b/saveme.txt", "files/myfile[1].txt"]
    for path in [*paths, "sample.obj", "sample.gltf", "sample.glb"]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(path)
    # Values that the examples assume.
    given: dict[str, Any] = {"wandb": lockstep, "os": os, "acc": 0.9, "loss": 0.1, "current_step": 7}
    given |= {"y_test": [0, 1], "y_probas": [0.5, 0.5], "labels": ["a", "b"]}
    runs: list[Any] = []
    for example in examples("wandb_init.py", "init") + examples("wandb_run.py", "Run", "log", "log_code", "save"):
        # One example is incomplete, and two need packages for pictures.
        if example.count("{") != example.count("}") or "matplotlib" in example or "PIL" in example:
            continue
        names = dict(given)
        exec(example.replace("import wandb", "import lockstep as wandb"), names)
        job = lockstep.Client().job(names["run"].name)
        assert job.state == "succeeded"
        runs.append((job.data["external"]["config"], stored_points(job), list(sizes(job))))
    assert runs[0] == ({"lr": 0.01, "batch_size": 32}, {"accuracy": [(0, 0.95)], "loss": [(0, 0.05)]}, [])
    series = [series for _, series, _ in runs]
    train = {"train/accuracy": [(0, 0.9)], "train/loss": [(0, 30)]}
    assert train | {"validate/accuracy": [(0, 0.8)], "validate/loss": [(0, 20)]} in series
    assert {"epoch": [(0, 40)], "train-loss": [(0, 0.5)]} in series
    assert {"loss": [(0, 0.2)], "accuracy": [(0, 0.8)]} in series
    losses = [(0, 0.5), (1, 0.4), (2, 0.5), (3, 0.4), (7, 0.5), (8, 0.4)]
    accuracies = [(0, 0.8), (1, 0.9), (2, 0.8), (3, 0.9), (7, 0.8), (8, 0.9)]
    assert {"train-loss": losses, "accuracy": accuracies} in series
    assert [files for _, _, files in runs if files] == [sorted(["are/myfiles/a.txt", *paths])]
