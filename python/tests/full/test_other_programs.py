"""Tests programs that use other libraries: Lightning and transformers log through MLflow's client and through this
package, and W&B's examples through this package. Needs Debian's PyTorch and Python: `bash tests/run full` installs
everything.
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
from test_examples import ROOT, example
from test_mlflow import server

import lockstep

# The fixture of test_mlflow starts a server for this module, too.
__all__ = ["server"]

# The first part of Lightning's programs: its demo model, which also logs to a CSV file, with its learning rate monitor.
LIGHTNING = """
import sys, types

# Replaces a module for models of several processes, which Debian's Python cannot import from Debian's PyTorch.
module = types.ModuleType("torch.distributed._shard.sharded_tensor")
module.pre_load_state_dict_hook = module.state_dict_hook = lambda *_: None
sys.modules[module.__name__] = module

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger

class LitModel(BoringModel):
    def __init__(self, depth=3):
        super().__init__()
        self.save_hyperparameters()

    def configure_callbacks(self):
        return [LearningRateMonitor()]

    def setup(self, stage):
        if stage == "fit":
            self.trainer.loggers = [*self.trainer.loggers, CSVLogger(".", name="", version="")]

    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train_loss", step["loss"])
        return step

    def validation_step(self, batch, batch_idx):
        step = super().validation_step(batch, batch_idx)
        self.log("val/loss", step["x"])
        return step

    def test_step(self, batch, batch_idx):
        self.log("test", float(batch_idx))

seed_everything(7)
model = LitModel()
# Lightning logs every 50th step, here the last step of each epoch.
data = torch.utils.data.DataLoader(RandomDataset(32, 50))
"""

# The rest of each program, and the project, the settings and the tags of its run.
LIGHTNING_LOGGERS: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "MLFlowLogger": (
        """
from lightning.pytorch.loggers import MLFlowLogger

logger = MLFlowLogger(experiment_name="boring", tags={"team": "vision"}, log_model=True)
Trainer(max_epochs=3, logger=logger).fit(model, data)
""",
        "boring",
        {"depth": "3"},
        {"team": "vision"},
    ),
    # Debian's PyTorch has no `torch.export`, which a logged model needs.
    "mlflow.autolog": (
        """
import mlflow

mlflow.set_experiment("autologged")
mlflow.autolog(log_models=False)
Trainer(max_epochs=3, logger=False).fit(model, data)
""",
        "autologged",
        {"epochs": "3", "optimizer_name": "SGD", "lr": "0.1"},
        {"mlflow.autologging": "pytorch"},
    ),
    "LockstepLogger": (example("docs/tracking.md", "LockstepLogger"), "digits", {"depth": 3}, {}),
}

# A training that fails in the second epoch. A test of the model then continues the run.
FAILS = """
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lockstep.integrations.lightning import LockstepLogger

class Fails(LitModel):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            raise ValueError("no data")

logger = LockstepLogger("fails", project="fails", prefix="a/", save_dir="kept")
trainer = Trainer(max_epochs=2, logger=logger)
try:
    trainer.fit(Fails(), data)
except ValueError:
    trainer.test(model, data)
# Other ranks log nothing.
rank_zero_only.rank = 1
logger.log_metrics({"train_loss": 9.0}, 999)
logger.log_hyperparams({"depth": 9})
logger.experiment.log({"a/train_loss": 9.0}, 999)
"""

# The first part of programs that use transformers. The network is created from its settings, so nothing is downloaded.
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
model = BertForSequenceClassification(config)
args = TrainingArguments(
    "out", run_name="tiny bert", report_to="none", num_train_epochs=2, per_device_train_batch_size=8,
    logging_steps=2, eval_strategy="epoch", save_steps=8, learning_rate=1e-3, use_cpu=True,
)
train = test = Sentences()
"""

TRANSFORMERS_FOR_MLFLOW = """
args.report_to = ["mlflow"]
trainer = Trainer(model, args, train_dataset=train, eval_dataset=test)
trainer.train()
"""

PREDICTS = """
trainer.save_state()
trainer.predict(test)
# Other ranks log nothing.
trainer.state.is_world_process_zero = False
trainer.log({"loss": 9.0})
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


def run_script(script: str, project: str) -> lockstep.Job:
    """Runs a script, and returns its run."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [job] = lockstep.Client().jobs(project=project)
    assert job.state == "succeeded"
    return job


def stored_points(job: lockstep.Job) -> dict[str, list[tuple[int, Any]]]:
    """Returns every stored point of every metric."""
    series: dict[str, list[tuple[int, Any]]] = {}
    text = job._send_once("GET", f"/jobs/{job.id}/metrics.csv").text
    for row in csv.DictReader(text.splitlines()):
        series.setdefault(row["name"], []).append((int(row["step"]), pytest.approx(float(row["value"]))))
    return series


def file_sizes(job: lockstep.Job) -> dict[str, int]:
    return {file["path"]: file["size_bytes"] for file in job.files()}


def csv_points(name: str) -> list[tuple[int, float]]:
    """Returns a metric's points in the file of Lightning's CSVLogger."""
    rows = csv.DictReader(Path("metrics.csv").read_text().splitlines())
    return [(int(row["step"]), float(row[name])) for row in rows if row[name]]


@pytest.mark.parametrize("logger", LIGHTNING_LOGGERS)
def test_lightning_logs_the_values_of_its_csv_file(logger: str) -> None:
    program, project, config, tags = LIGHTNING_LOGGERS[logger]
    job = run_script(LIGHTNING + program, project)
    series = stored_points(job)
    for name in ("train_loss", "val/loss", *(["lr-SGD"] if logger != "mlflow.autolog" else [])):
        points = csv_points(name)
        assert len(points) == 3
        # MLflow's autologging logs by epoch.
        assert series[name] == (list(enumerate(value for _, value in points)) if "auto" in logger else points), name
    external = job.data["external"]
    assert external["config"].items() >= config.items() and external.get("values", {}).items() >= tags.items()
    if logger == "MLFlowLogger":
        [checkpoint] = Path().rglob("*.ckpt")
        stored, folder = file_sizes(job), f"model/checkpoints/{checkpoint.stem}"
        assert stored.keys() == {f"{folder}/{name}" for name in (checkpoint.name, "metadata.yaml", "aliases.txt")}
        assert stored[f"{folder}/{checkpoint.name}"] == checkpoint.stat().st_size


def test_a_failed_training_of_lightning_fails_its_run_which_a_test_continues() -> None:
    job = run_script(LIGHTNING + FAILS, "fails")
    states = [(event["state"], event.get("reason")) for event in job.events("state")]
    assert states == [("running", None), ("failed", "ValueError: no data"), ("running", None), ("succeeded", None)]
    series = stored_points(job)
    assert series.keys() == {"a/epoch", "a/train_loss", "a/val/loss", "a/lr-SGD", "a/test"}
    assert [step for step, _ in series["a/train_loss"]] == [49] and series["a/test"] == [(50, 24.5)]
    assert job.data["external"]["config"] == {"depth": 3}
    [folder] = Path("kept/lockstep-runs").iterdir()
    assert Path("kept/fails", folder.name, "checkpoints").is_dir()


@pytest.mark.parametrize(
    "program",
    [TRANSFORMERS_FOR_MLFLOW, example("docs/tracking.md", "LockstepCallback")],
    ids=["MLflowCallback", "LockstepCallback"],
)
def test_transformers_logs_the_values_of_its_history(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tagged")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "text"}')
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    uses_mlflow = program == TRANSFORMERS_FOR_MLFLOW
    job = run_script(TRANSFORMERS + program + PREDICTS, "tagged" if uses_mlflow else "glue")
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    series = stored_points(job)
    for name, steps in [("loss", [2, 4, 6, 8]), ("learning_rate", [2, 4, 6, 8]), ("eval_loss", [4, 8])]:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        renamed = name if uses_mlflow else f"train/{name}" if "eval" not in name else "eval/loss"
        assert [step for step, _ in points] == steps and points == series[renamed], name
    external = job.data["external"]
    config = {name: float(external["config"][name]) for name in ("learning_rate", "hidden_size")}
    assert job.name == "tiny bert" and config == {"learning_rate": 0.001, "hidden_size": 16}
    if uses_mlflow:
        assert external["values"]["team"] == "text"
        # The model is stored in MLflow's format, which contains the checkpoint.
        stored, weights = file_sizes(job), "checkpoint-8/model.safetensors"
        assert "checkpoint-8/MLmodel" in stored
        assert stored[f"checkpoint-8/artifacts/{weights}"] == Path("out", weights).stat().st_size
    else:
        assert external["summary"]["train_loss"] == history[-1]["train_loss"]
        assert [step for step, _ in series["test/loss"]] == [8]


def wandb_examples(file: str, *calls: str) -> list[str]:
    """Returns the examples of these calls in W&B's documentation, which is generated from the package's comments."""
    found = []
    for node in ast.walk(ast.parse((ROOT / "target/wandb/wandb/sdk" / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in calls:
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
    texts = wandb_examples("wandb_init.py", "init") + wandb_examples("wandb_run.py", "Run", "log", "log_code", "save")
    for text in texts:
        # One example is incomplete, and two need packages for pictures.
        if text.count("{") != text.count("}") or "matplotlib" in text or "PIL" in text:
            continue
        names = dict(given)
        exec(text.replace("import wandb", "import lockstep as wandb"), names)
        job = lockstep.Client().job(names["run"].name)
        assert job.state == "succeeded"
        runs.append((job.data["external"]["config"], stored_points(job), list(file_sizes(job))))
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
