"""A callback for `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .. import session
from ..tracking import Run

# Results of the whole training, which the Trainer logs once.
RESULTS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


def _renamed(logs: dict[str, Any]) -> dict[str, Any]:
    """Renames metrics like the Trainer's own callbacks: `eval_loss` to `eval/loss`, `loss` to `train/loss`."""
    renamed = {}
    for name, value in logs.items():
        group = next((group for group in ("eval", "test") if name.startswith(f"{group}_")), None)
        renamed[f"{group}/{name.removeprefix(f'{group}_')}" if group else f"train/{name}"] = value
    return renamed


class LockstepCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the values that a `Trainer` logs: `Trainer(..., callbacks=[LockstepCallback(project="glue")])`.

    `settings`: arguments of `lockstep.init`. If a run is already active, the callback uses this run. The run stays open
    after the training, for evaluations, until `lockstep.finish` or the end of the program.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Run | None = None

    def _active_run(self, args: Any, state: Any, model: Any = None) -> Run:
        """Returns the active run, or else a new run. Records the training's settings when it first uses a run."""
        if self._run is None or session.current() is not self._run:
            name = state.trial_name or getattr(args, "run_name", None)
            settings: dict[str, Any] = {"name": name} | self._settings
            self._run = session.current() or session.init(**settings)
            config: Any = getattr(model, "config", None) or {}
            config = config.to_dict() if hasattr(config, "to_dict") else dict(config)
            self._run.config.update(config | args.to_dict(), allow_val_change=True)
        return self._run

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins the run; in a search for hyperparameters, each trial is a run."""
        if state.is_world_process_zero:
            if state.is_hyper_param_search:
                session.finish()
            self._active_run(args, state, model)

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any
    ) -> None:
        """Logs values at the Trainer's step."""
        if state.is_world_process_zero and logs:
            run = self._active_run(args, state, model)
            run.summary.update({name: value for name, value in logs.items() if name in RESULTS})
            run.log(_renamed({name: value for name, value in logs.items() if name not in RESULTS}), state.global_step)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Logs the metrics of a prediction."""
        if state.is_world_process_zero:
            self._active_run(args, state).log(_renamed(metrics), state.global_step)
