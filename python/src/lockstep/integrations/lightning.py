"""A logger for Lightning, from the package that the program has imported: `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from .. import session
from ..tracking import Run, outcome
from ..values import to_dict

_is_pytorch_lightning = "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
_package = "pytorch_lightning" if _is_pytorch_lightning else "lightning.pytorch"
_loggers = importlib.import_module(f"{_package}.loggers.logger")
_rank_zero_only = importlib.import_module(f"{_package}.utilities.rank_zero").rank_zero_only


class LockstepLogger(_loggers.Logger):  # type: ignore[misc, name-defined]
    """Logs the values that a `Trainer` logs: `Trainer(logger=LockstepLogger(project="mnist"))`.

    `save_dir`: the folder that contains `lockstep-runs`. `version`: the id of a run to continue (default: a new run).
    `prefix`: put before the metrics' names. `init`: other arguments of `lockstep.init`. If a run is already active, the
    logger uses this run. The run stays open after the training, for tests, until `lockstep.finish` or the end of the
    program; a training that fails ends the run.
    """

    def __init__(
        self,
        name: str | None = None,
        project: str = "lightning",
        save_dir: str | Path = ".",
        version: str | None = None,
        prefix: str = "",
        **init: Any,
    ) -> None:
        super().__init__()
        self._prefix = prefix
        self._init = init | {"name": name, "project": project, "dir": str(save_dir), "id": version}
        self._run: Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A process that Lightning starts begins or continues the run itself.
        return self.__dict__ | {"_run": None}

    def _experiment(self) -> Run:
        if self._run is None or session.current() is not self._run:
            self._run = session.current() or session.init(**self._init)
            self._init["id"] = self._run.id
        return self._run

    # On ranks other than the first, this is an object that accepts every call and does nothing.
    experiment = property(_loggers.rank_zero_experiment(_experiment), doc="The run.")

    @property
    def name(self) -> str:
        """The project, which names the folder of Lightning's checkpoints."""
        return str(self._init["project"])

    @property
    def version(self) -> str | None:
        """The run's id; None until the run has begun."""
        return self._init["id"]  # type: ignore[no-any-return]

    @property
    def save_dir(self) -> str:
        """The folder that contains `lockstep-runs`."""
        return str(self._init["dir"])

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Logs values at Lightning's step."""
        if _rank_zero_only.rank == 0:
            self._experiment().log({self._prefix + name: value for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Adds settings."""
        if _rank_zero_only.rank == 0:
            self._experiment().config.update(to_dict(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        """Ends the run if the training has failed."""
        if self._run is not None and status == "failed":
            self._run._end(*outcome(sys.exc_info()[1] or RuntimeError("the training failed")))
