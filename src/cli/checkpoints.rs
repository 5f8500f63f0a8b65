//! `lockstep checkpoints`: the checkpoints of a job.

use super::{
    api::{JobArgs, parse_elements},
    block_on,
    checkpoint_choice::ListedCheckpoint,
    output,
};

/// Prints the checkpoints.
///
/// # Errors
/// Exit status 2 if the job does not exist.
pub(crate) fn run(args: JobArgs) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let checkpoints = block_on(async {
        let job = api.find_job(&args.job).await?;
        api.read_all(&format!("/jobs/{}/checkpoints", job.id)).await
    })?;
    if args.server.json {
        return output::json(&checkpoints);
    }
    if checkpoints.is_empty() {
        return output::line("no checkpoint yet");
    }
    let checkpoints: Vec<ListedCheckpoint> = parse_elements(&checkpoints, "checkpoints");
    let header = ["STEP", "EPOCH", "ATTEMPT", "ACCURACY", "SIZE", "", "ID"];
    output::table(header, checkpoints.iter().map(row))
}

fn row(ListedCheckpoint { id, attempt, info, missing }: &ListedCheckpoint) -> [String; 7] {
    let marks = [(info.best, "best"), (*missing, "files missing")];
    let marks: Vec<_> = marks.into_iter().filter_map(|(is_set, mark)| is_set.then_some(mark)).collect();
    [
        info.step.to_string(),
        info.epoch.to_string(),
        attempt.to_string(),
        info.accuracy_in_words().unwrap_or_default(),
        format!("{:.1} MB", info.size_bytes as f64 / 1e6),
        marks.join(", "),
        id.clone(),
    ]
}
