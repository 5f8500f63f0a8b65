//! `lockstep queue`: shows waiting jobs, the reasons why they wait, and slots that are reserved for them.

use super::{
    api::{ServerArgs, parse_elements, parse_list, present_parameters},
    block_on, output,
};
use lockstep_protocol::queue::{QueuedJob, Reservation};
use serde_json::{Value, json};

/// Show waiting jobs in the order in which they get slots, the reason why each job waits, and reserved slots
///
/// SLOTS is the number of slots that a job needs, and KEPT the number of slots that are kept for the job. KEPT is left out if no slot is
/// kept.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only jobs of this project
    #[arg(long)]
    project: Option<String>,
    /// Only jobs of this person, or of the token with this name
    #[arg(long)]
    owner: Option<String>,
    /// Maximum number of lines to print
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Index of the column KEPT.
const KEPT_COLUMN: usize = 7;

/// Prints the queue.
///
/// # Errors
/// The server is unreachable.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let query = present_parameters([("project", args.project), ("owner", args.owner)]);
    let (jobs, page) = block_on(async {
        let jobs = api.read_pages("/queue", &query, args.limit).await?;
        // Every page has the same reservations, so one job is enough.
        anyhow::Ok((jobs, api.get::<Value>("/queue?limit=1&fields=place").await?))
    })?;
    if args.server.json {
        return output::json(&json!({"jobs": jobs, "reservations": page["reservations"]}));
    }
    let jobs: Vec<QueuedJob> = parse_elements(&jobs, "jobs");
    let reservations: Vec<Reservation> = parse_list(&page, "reservations")?;
    if jobs.is_empty() {
        output::line(if query.is_empty() { "no job waits" } else { "no waiting job matches" })?;
    } else {
        let mut rows: Vec<Vec<String>> = jobs.iter().map(|job| row(job).into()).collect();
        let mut header = vec![
            "PLACE",
            "JOB",
            "NAME",
            "PROJECT",
            "OWNER",
            "PRIORITY",
            "SLOTS",
            "KEPT",
            "SINCE",
            "WAITS FOR",
        ];
        if rows.iter().all(|row| row[KEPT_COLUMN].is_empty()) {
            header.remove(KEPT_COLUMN);
            rows.iter_mut().for_each(|row| drop(row.remove(KEPT_COLUMN)));
        }
        output::table_of_sentences(&header, &["NAME", "PROJECT", "OWNER"], &rows)?;
    }
    let mut lines = reservations.iter().map(describe_reservation);
    lines.try_for_each(|line| output::line(output::one_line(&line)))
}

fn row(job: &QueuedJob) -> [String; 10] {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    [
        job.place.to_string(),
        job.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        job.name.clone().unwrap_or_else(|| "(private)".into()),
        text(&job.project),
        text(&job.owner),
        job.priority.map(|priority| priority.to_string()).unwrap_or_default(),
        job.ranks.map(|ranks| ranks.to_string()).unwrap_or_default(),
        job.kept_slots.filter(|slots| *slots > 0).map(|slots| slots.to_string()).unwrap_or_default(),
        job.waiting_since.map(|since| format!("{since:.0}")).unwrap_or_default(),
        job.reason.as_ref().map(ToString::to_string).unwrap_or_default(),
    ]
}

/// Formats a reservation: `a: slots 0, 1, and every other slot that becomes free, kept for large (j...)`.
fn describe_reservation(reservation: &Reservation) -> String {
    let slots = |numbers: &[u32]| {
        let list: Vec<_> = numbers.iter().map(ToString::to_string).collect();
        format!("slot{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
    };
    let mut parts = Vec::new();
    if !reservation.free.is_empty() {
        parts.push(slots(&reservation.free));
    }
    if !reservation.ending.is_empty() {
        parts.push(format!("{} of jobs that are ending", slots(&reservation.ending)));
    }
    if reservation.whole_machine {
        parts.push(format!("every{} slot that becomes free", if parts.is_empty() { "" } else { " other" }));
    }
    let job = match (&reservation.name, &reservation.job) {
        (Some(name), Some(job)) => format!("{name} ({job})"),
        _ => "a private job".into(),
    };
    format!("{}: {}, kept for {job}", reservation.agent, parts.join(", and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_jobs_have_a_place_and_reservations_are_sentences() {
        let private = QueuedJob { place: 3, ..QueuedJob::default() };
        assert_eq!(row(&private)[..3], ["3".to_owned(), String::new(), "(private)".to_owned()]);
        let mut reservation = Reservation {
            agent_id: "id-a".into(),
            agent: "a".into(),
            job: None,
            name: None,
            free: vec![0, 1],
            ending: vec![2],
            whole_machine: true,
            since: jiff::Timestamp::UNIX_EPOCH,
        };
        let words = "a: slots 0, 1, and slot 2 of jobs that are ending, and every other slot that becomes free, kept for a private job";
        assert_eq!(describe_reservation(&reservation), words);
        (reservation.free, reservation.ending) = (Vec::new(), Vec::new());
        assert_eq!(
            describe_reservation(&reservation),
            "a: every slot that becomes free, kept for a private job"
        );
    }
}
