//! Sweeps, and one sweep with its trials.

use crate::{
    layout::CurrentUser,
    numbers::{self, count, plural},
};
use askama::Template;
use lockstep_protocol::{
    JobId,
    sweep::{Sweep, SweepState, Trial},
};
use serde_json::Value;

/// `GET /sweeps`.
#[derive(Debug, Clone, Template)]
#[template(path = "sweeps.html")]
pub struct SweepsPage {
    /// Newest first.
    pub sweeps: Vec<Sweep>,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

/// `GET /sweeps/{id}`.
#[derive(Debug, Clone, Template)]
#[template(path = "sweep.html")]
pub struct SweepPage {
    /// The sweep, with its trials.
    pub sweep: Sweep,
    /// Whether the user may pause, cancel and delete the sweep.
    pub may_change: bool,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

/// Maximum number of trials that the link to the page Compare contains.
const MAX_COMPARED: usize = 50;

impl SweepPage {
    /// Counts trials and steps: `12 of 27 trials ended · 1,200 steps`.
    fn summary(&self) -> String {
        let Sweep { ended, trial_count, steps, .. } = &self.sweep;
        format!("{ended} of {} ended · {}", plural(u64::from(*trial_count), "trial"), plural(*steps, "step"))
    }

    /// Returns the keys of the parameters.
    fn keys(&self) -> Vec<&str> {
        let first = self.sweep.trials.first();
        first.map(|trial| trial.setting.keys().map(String::as_str).collect()).unwrap_or_default()
    }

    fn metric_name(&self) -> &'static str {
        if self.sweep.metric == "val_loss" { "validation loss" } else { "validation accuracy" }
    }

    fn best_job(&self) -> Option<&JobId> {
        self.sweep.best.as_ref().and_then(|best| best.job.as_ref())
    }

    /// Returns the URL of the page Compare with the trials' jobs, the best first; `None` for fewer than two jobs.
    fn compare_url(&self) -> Option<String> {
        let best = self.best_job();
        let jobs = self.sweep.trials.iter().filter_map(|trial| trial.job.as_ref());
        let others = jobs.filter(|job| Some(*job) != best);
        let ids: Vec<_> =
            best.into_iter().chain(others).take(MAX_COMPARED).map(ToString::to_string).collect();
        (ids.len() > 1).then(|| format!("/compare?jobs={}", ids.join(",")))
    }

    /// Returns the epoch after which a trial was last compared with others; a dash before its first comparison.
    fn rung(&self, trial: &Trial) -> String {
        trial.epoch.map_or_else(|| "–".into(), |epoch| format!("epoch {}", count(u64::from(epoch))))
    }

    fn is_best(&self, trial: &Trial) -> bool {
        self.sweep.best.as_ref().is_some_and(|best| best.number == trial.number)
    }
}

/// Returns the sweep's method: `grid`, `random` or `asha`.
fn method(sweep: &Sweep) -> &str {
    sweep.spec.pointer("/sweep/method").and_then(Value::as_str).unwrap_or_default()
}

/// Returns a trial's metric as text; a dash before its first validation.
fn metric(sweep: &Sweep, trial: &Trial) -> String {
    sweep.metric_of(trial).unwrap_or_else(|| "–".into())
}

/// Returns a parameter's value as text.
fn setting(trial: &Trial, key: &str) -> String {
    trial.setting.get(key).map(numbers::setting).unwrap_or_default()
}

/// Returns all parameters of a trial as text: `train.lr=0.1, train.seed=2`.
fn settings(trial: &Trial) -> String {
    let assignment = |key: &String| format!("{key}={}", setting(trial, key));
    trial.setting.keys().map(assignment).collect::<Vec<_>>().join(", ")
}

/// Returns the value of `data-state` that gives a sweep's state its colours.
fn tone(state: SweepState) -> &'static str {
    match state {
        SweepState::Finished => "succeeded",
        other => other.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::Timestamp;
    use lockstep_protocol::JobState;
    use serde_json::json;

    #[test]
    fn sweeps_show_their_trials_and_buttons_only_to_owners() {
        let trial = |number: u32, metric: Option<f64>| Trial {
            number,
            setting: [("train.lr".into(), json!("<b>0.1"))].into(),
            job: metric.map(|_| JobId::generate()),
            deleted: number == 4,
            state: metric.map(|_| if number == 1 { JobState::Cancelled } else { JobState::Succeeded }),
            ended_early: number == 1,
            rung: u32::from(metric.is_some()),
            metric,
            val_pictures: Some(200),
            epoch: metric.map(|_| 3),
            step: 10,
        };
        let trials = vec![trial(1, Some(0.25)), trial(2, Some(0.75)), trial(3, None), trial(4, None)];
        let sweep = Sweep {
            id: "sweep-1".into(),
            name: "<i>lrs".into(),
            project: "default".into(),
            state: SweepState::Running,
            reason: None,
            owner: None,
            private: false,
            spec: json!({"sweep": {"method": "grid", "parameters": {"train.lr": {"values": ["<b>0.1"]}}}}),
            metric: "val_accuracy".into(),
            rungs: vec![3],
            warnings: Vec::new(),
            trial_count: 4,
            ended: 2,
            paused: vec![3],
            best: Some(trials[1].clone()),
            steps: 1200,
            trials,
            created_at: Timestamp::UNIX_EPOCH,
            finished_at: None,
        };
        let page = |may_change| {
            let page = SweepPage { sweep: sweep.clone(), may_change, user: CurrentUser::NOBODY };
            page.render().expect("renders")
        };
        let html = page(true);
        let [first, best] = [0, 1].map(|index: usize| sweep.trials[index].job.clone().expect("a job"));
        let links = [format!("/compare?jobs={best},{first}\""), format!("/jobs/new?from={best}\"")];
        for part in [
            "2 of 4 trials ended · 1,200 steps",
            "trial 3 is paused",
            "deleted",
            "data-state=\"cancelled\">ended early<",
            "epoch 3",
            "<td>75.0 % ± 3.1 of 200</td>",
            "not started",
            "Best validation accuracy: 75.0 % ± 3.1 of 200",
            "<th scope=\"col\">Best validation accuracy</th>",
            &links[0],
            &links[1],
            "data-act=\"pause\"",
            "data-act=\"cancel\"",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("<i>lrs") && !html.contains("<b>0.1"), "{html}");
        assert!(!page(false).contains("data-act") && !html.contains("data-act=\"delete\""));
        let leading = Trial { epoch: None, rung: 0, ..sweep.trials[1].clone() };
        let early = Sweep { best: Some(leading), ..sweep.clone() };
        let early = SweepPage { sweep: early, may_change: true, user: CurrentUser::NOBODY };
        let early = early.render().expect("renders");
        assert!(early.contains(">2</a>, so far: train.lr="), "before the first comparison: {early}");
        let finished_at = Some(Timestamp::UNIX_EPOCH);
        let finished = Sweep { finished_at, state: SweepState::Finished, ..sweep.clone() };
        let finished = SweepPage { sweep: finished, may_change: true, user: CurrentUser::NOBODY };
        assert!(finished.render().expect("renders").contains("data-act=\"delete\""));
        let list = SweepsPage { sweeps: vec![sweep], user: CurrentUser::NOBODY };
        let list = list.render().expect("renders");
        assert!(list.contains("href=\"/sweeps/sweep-1\"") && list.contains("75.0 %"), "{list}");
    }
}
