//! `lockstep logs`: prints the log of a job's ranks.

use super::{
    api::{Api, ServerArgs, parse_list},
    block_on, output,
    show::AttemptRow,
    usage_error,
    watch::{self, Display},
};
use lockstep_protocol::{
    Job, JobState,
    agent::LogLine,
    numbers::plural,
    stream::{Event, EventBody, Frame},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;

/// Print a job's log
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// Follow the log until the job ends
    #[arg(short, long)]
    follow: bool,
    /// Only this rank's lines
    #[arg(long, value_name = "R")]
    rank: Option<u32>,
    /// Only this attempt's lines
    #[arg(long, value_name = "N")]
    attempt: Option<u32>,
    #[command(flatten)]
    server: ServerArgs,
}

/// A log line with its attempt and rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Line {
    attempt: u32,
    rank: u32,
    #[serde(flatten)]
    log: LogLine,
}

/// Prints the existing lines, then new lines if `--follow` is given.
///
/// # Errors
/// Exit status 2 if the job, the rank or the attempt does not exist.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        check_rank_and_attempt(&args, &job)?;
        let end_reasons = if job.attempt > 1 && !args.server.json {
            read_end_reasons(&api, &job).await?
        } else {
            HashMap::new()
        };
        let last_numbers = HashMap::new();
        let mut printer = Printer { args: &args, last_numbers, last_attempt: None, end_reasons };
        print_history(&api, &job, &mut printer).await?;
        if job.external.is_some() && printer.last_attempt.is_none() {
            output::warn(format_args!("{} is a run from elsewhere, whose program has sent no log", job.id));
        }
        if args.follow {
            watch::follow(&api, job, &mut printer).await?;
        }
        Ok(())
    })
}

/// Checks that the job has the rank and the attempt that the options name. With `--follow`, the attempt may start later.
fn check_rank_and_attempt(args: &Args, job: &Job) -> anyhow::Result<()> {
    if let Some(rank) = args.rank.filter(|rank| *rank >= job.ranks) {
        let (id, last) = (&job.id, job.ranks.saturating_sub(1));
        return Err(usage_error(format!("--rank: {id} has no rank {rank}; its ranks are 0 to {last}")));
    }
    let may_start = args.follow && !job.state.is_final();
    if let Some(attempt) = args.attempt.filter(|attempt| *attempt > job.attempt && !may_start) {
        let attempts = plural(job.attempt.into(), "attempt");
        return Err(usage_error(format!(
            "--attempt: {} has no attempt {attempt}; it has {attempts}",
            job.id
        )));
    }
    Ok(())
}

/// Returns the reason for the end of each attempt, by the attempt's number.
async fn read_end_reasons(api: &Api, job: &Job) -> anyhow::Result<HashMap<u32, String>> {
    let response: Value = api.get(&format!("/jobs/{}/attempts", job.id)).await?;
    let attempts: Vec<AttemptRow> = parse_list(&response, "attempts")?;
    let reason = |row: AttemptRow| Some((row.attempt, row.reason?.words().to_owned()));
    Ok(attempts.into_iter().filter_map(reason).collect())
}

async fn print_history(api: &Api, job: &Job, printer: &mut Printer<'_>) -> anyhow::Result<()> {
    let mut query = "sort=seq&limit=1000".to_owned();
    query.extend(printer.args.rank.map(|rank| format!("&rank={rank}")));
    query.extend(printer.args.attempt.map(|attempt| format!("&attempt={attempt}")));
    let mut cursor = String::new();
    loop {
        let page: Value = api.get(&format!("/jobs/{}/logs?{query}{cursor}", job.id)).await?;
        let lines: Vec<Line> = parse_list(&page, "lines")?;
        printer.print(lines.into_iter())?;
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return Ok(()),
        }
    }
}

struct Printer<'a> {
    args: &'a Args,
    /// The number of the last printed line, for each attempt and rank.
    last_numbers: HashMap<(u32, u32), u64>,
    /// The attempt of the last printed line.
    last_attempt: Option<u32>,
    /// The reason for the end of each attempt, by the attempt's number.
    end_reasons: HashMap<u32, String>,
}

impl Printer<'_> {
    fn print(&mut self, lines: impl Iterator<Item = Line>) -> anyhow::Result<()> {
        for line in lines {
            let is_selected = self.args.rank.is_none_or(|rank| rank == line.rank)
                && self.args.attempt.is_none_or(|attempt| attempt == line.attempt);
            let last_number = self.last_numbers.entry((line.attempt, line.rank)).or_default();
            // Lines that the server writes have no number.
            if !is_selected || (line.log.number > 0 && line.log.number <= *last_number) {
                continue;
            }
            *last_number = line.log.number.max(*last_number);
            let last_attempt = self.last_attempt.replace(line.attempt);
            if last_attempt.is_some_and(|last| last < line.attempt) && !self.args.server.json {
                let previous = line.attempt - 1;
                let why = self.end_reasons.get(&previous);
                let why = why.map(|why| format!("; attempt {previous} ended: {}", output::one_line(why)));
                output::line(format_args!("attempt {} begins{}", line.attempt, why.unwrap_or_default()))?;
            }
            // A line feed in the text would start a line that the rank did not write.
            let text = line.log.text.replace('\n', "\\n");
            if self.args.server.json {
                output::line(serde_json::to_string(&line)?)?;
            } else if self.args.rank.is_some() {
                output::line(text)?;
            } else {
                output::line(format_args!("[rank {}] {text}", line.rank))?;
            }
        }
        Ok(())
    }
}

impl Display for Printer<'_> {
    fn show(&mut self, frame: &Frame) -> anyhow::Result<()> {
        match frame {
            Frame::Event(Event { body: EventBody::Log { attempt, rank, lines }, .. }) => self
                .print(lines.iter().map(|line| Line { attempt: *attempt, rank: *rank, log: line.clone() })),
            Frame::Event(Event {
                body: EventBody::State { state: JobState::Restarting, reason: Some(reason), attempt, .. },
                ..
            }) => {
                self.end_reasons.insert(*attempt, reason.clone());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn warn(&self, text: &str) {
        output::warn(text);
    }
}
