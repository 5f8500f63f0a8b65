"""Tests MLflow's client with a real server: the program LOCKSTEP_BIN, or this tree's debug build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from test_examples import example
from test_lockstep import serve

mlflow = pytest.importorskip("mlflow")
MlflowException = pytest.importorskip("mlflow.exceptions").MlflowException
MlflowClient = pytest.importorskip("mlflow.tracking").MlflowClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Starts a server and gives its URL and token."""
    folder = tmp_path_factory.mktemp("mlflow")
    with serve(folder, "--no-local-agent") as url:
        yield url, (folder / "lockstep-data/token").read_text().strip()


def test_mlflow_client_logs_and_reads_a_run(
    server: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, token = server
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    mlflow.set_tracking_uri(url)
    mlflow.set_experiment("digits")
    with mlflow.start_run(run_name="mnist") as run:
        mlflow.log_params({"lr": 0.1, "net/depth": 3})
        for step in range(20):
            mlflow.log_metric("train/loss", 1 / (step + 1), step=step)
        mlflow.log_metrics({"val acc": 0.5, "diverged": float("nan")}, step=3)
        mlflow.set_tags({"colour": "blue", "size": 7})
        with pytest.raises(MlflowException, match="Changing param values is not allowed"):
            mlflow.log_param("lr", 0.2)
        mlflow.log_text("text", "notes/file.txt")
        (tmp_path / "model/data").mkdir(parents=True)
        (tmp_path / "model/MLmodel").write_text("flavors: {}")
        (tmp_path / "model/data/weights.safetensors").write_bytes(bytes(range(256)) * 9000)
        mlflow.log_artifacts(str(tmp_path / "model"), "model")
    run_id = run.info.run_id
    stored = mlflow.get_run(run_id)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "mnist")
    assert stored.data.params == {"lr": "0.1", "net/depth": "3"}
    assert stored.data.metrics == {"train/loss": pytest.approx(0.05), "val acc": 0.5}
    assert (stored.data.tags["colour"], stored.data.tags["size"]) == ("blue", "7")
    client = MlflowClient()
    history = client.get_metric_history(run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history][:2] == [(0, 1.0), (1, 0.5)]
    assert len(history) == 20
    for path, expected in [
        (None, [("model", True), ("notes", True)]),
        ("model", [("model/MLmodel", False), ("model/data", True)]),
        ("model/MLmodel", []),
    ]:
        assert [(file.path, file.is_dir) for file in client.list_artifacts(run_id, path)] == expected
    for number, path in enumerate([".", "model", "model/data/weights.safetensors"]):
        copies = tmp_path / f"copy-{number}"
        mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=path, dst_path=str(copies))
        [weights] = copies.rglob("weights.safetensors")
        assert weights.read_bytes() == bytes(range(256)) * 9000
    assert mlflow.artifacts.load_text(f"runs:/{run_id}/notes/file.txt") == "text"
    runs = mlflow.search_runs(experiment_names=["digits"], output_format="list")
    assert [listed.info.run_id for listed in runs] == [run_id]
    assert "digits" in [experiment.name for experiment in mlflow.search_experiments()]

    # The run is also a job of Lockstep.
    headers = {"authorization": f"Bearer {token}"}
    job = httpx.get(f"{url}/api/v1/jobs/{run_id}", headers=headers).json()
    assert (job["state"], job["project"], job["external"]["config"]["lr"]) == ("succeeded", "digits", "0.1")

    # The token also works as a password.
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", token)
    with pytest.raises(ZeroDivisionError), mlflow.start_run():
        1 / 0  # noqa: B018
    assert mlflow.last_active_run().info.status == "FAILED"
    client.delete_run(run_id)
    with pytest.raises(MlflowException, match="not found"):
        client.get_run(run_id)


def test_example_of_the_tracking_page_runs_unchanged(
    server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server[1])
    mlflow.set_tracking_uri(server[0])
    exec(example("docs/tracking.md", "import mlflow"))
    run = mlflow.last_active_run()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mnist")
    assert run.data.params == {"lr": "0.1", "batch_size": "64"}
    history = MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history][-1] == (99, pytest.approx(0.01)) and len(history) == 100
