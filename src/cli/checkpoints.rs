//! `lockstep checkpoints`: the checkpoints of a job.

use super::{api::JobArgs, block_on, output};
use lockstep_protocol::numbers::accuracy_of;
use serde_json::Value;

/// Prints the checkpoints.
///
/// # Errors
/// Exit status 2 if the job does not exist.
pub(crate) fn run(args: JobArgs) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let checkpoints = block_on(async {
        let job = api.find_job(&args.job).await?;
        api.read_pages(&format!("/jobs/{}/checkpoints", job.id), "checkpoints", &[], None).await
    })?;
    if args.server.json {
        return output::json(&checkpoints);
    }
    if checkpoints.is_empty() {
        return output::line("no checkpoint yet");
    }
    let header = ["STEP", "EPOCH", "ATTEMPT", "ACCURACY", "SIZE", "", "ID"];
    output::table(header, checkpoints.iter().map(row))
}

fn row(checkpoint: &Value) -> [String; 7] {
    let number = |key: &str| checkpoint[key].as_u64().map(|n| n.to_string()).unwrap_or_default();
    [
        number("step"),
        number("epoch"),
        number("attempt"),
        checkpoint["val_accuracy"]
            .as_f64()
            .map(|accuracy| accuracy_of(accuracy, checkpoint["validation"]["pictures"].as_u64()))
            .unwrap_or_default(),
        checkpoint["size_bytes"].as_f64().map(|b| format!("{:.1} MB", b / 1e6)).unwrap_or_default(),
        if checkpoint["best"] == true { "best".into() } else { String::new() },
        checkpoint["id"].as_str().unwrap_or_default().to_owned(),
    ]
}
