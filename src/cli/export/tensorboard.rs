//! `lockstep export tensorboard`: writes jobs' metrics and settings as TensorBoard's event files.

use crate::cli::{
    api::{Api, Outage, ServerArgs},
    block_on,
    compare::flatten,
    event_files::{Event, FILE_VERSION, Hparam, Summary, SummaryValue},
    history::{self, Point},
    output, usage_error,
};
use anyhow::Context;
use jiff::Timestamp;
use lockstep_protocol::{Job, JobState};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Points of each metric, by the metric's name.
type Series = BTreeMap<String, Vec<Point>>;

/// Write jobs' metrics and settings for TensorBoard: a run for each job, and another run for each rank after rank 0
#[derive(clap::Args)]
pub(super) struct Args {
    /// Jobs: an id, the start of an id, or a name
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    /// Folder for the runs, for tensorboard --logdir
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Keep adding new points until the jobs have ended
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Minimum interval at which `--follow` asks for new points. TensorBoard reads its files again at the same interval.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(5);

/// The event files of a job.
#[derive(Serialize)]
struct JobExport {
    job: String,
    folder: PathBuf,
    points: usize,
    /// Whether the job has ended, so that the files are complete.
    #[serde(skip)]
    has_ended: bool,
    /// The file of each rank.
    #[serde(skip)]
    files: BTreeMap<u32, RankFile>,
}

/// Writes a folder for each job. An earlier export of the same job is replaced.
///
/// # Errors
/// Exit status 2 if a job does not exist or has no metrics.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let mut exports = Vec::new();
        for job in &args.jobs {
            let job = api.find_job(job).await?;
            let folder = args.output.join(folder_name(&job));
            exports.push(JobExport {
                job: job.id.to_string(),
                folder,
                points: 0,
                has_ended: false,
                files: BTreeMap::new(),
            });
        }
        let mut outage = Outage::default();
        loop {
            let began = Instant::now();
            let round = async {
                for export in exports.iter_mut().filter(|export| !export.has_ended) {
                    export.update(&api).await?;
                }
                anyhow::Ok(())
            };
            match round.await {
                Ok(()) => outage.report_restored(|text| output::warn(text)),
                // A file that cannot be written is no outage of the server.
                Err(error) if !args.follow || error.is::<io::Error>() => return Err(error),
                Err(error) => {
                    outage.tolerate(error, |text| output::warn(text))?;
                    tokio::time::sleep(FOLLOW_INTERVAL).await;
                    continue;
                }
            }
            if !args.follow || exports.iter().all(|export| export.has_ended) {
                break;
            }
            // Each round reads all points. The pause is ten times as long as the round, so the server is busy with this export for at
            // most a tenth of the time.
            tokio::time::sleep(FOLLOW_INTERVAL.max(10 * began.elapsed())).await;
        }
        if let Some(export) = exports.iter().find(|export| export.files.is_empty()) {
            return Err(usage_error(format!("job {} has no metrics", export.job)));
        }
        if args.server.json {
            return output::json(&exports);
        }
        for JobExport { folder, points, .. } in &exports {
            output::line(format_args!("{}: {points} points", folder.display()))?;
        }
        Ok(())
    })
}

impl JobExport {
    /// Writes the points that the files lack.
    async fn update(&mut self, api: &Api) -> anyhow::Result<()> {
        let job: Job = api.get(&format!("/jobs/{}", self.job)).await?;
        let mut attempts: Vec<AttemptTimes> = api.list(&format!("/jobs/{}/attempts", job.id)).await?;
        // A run from elsewhere has one attempt, which is not in the list.
        if attempts.is_empty()
            && let Some(started_at) = job.started_at
        {
            attempts.push(AttemptTimes { attempt: job.attempt, started_at, ended_at: job.finished_at });
        }
        for rank in 0..job.ranks {
            let series = history::read_points(api, job.id.as_str(), rank).await?;
            if series.is_empty() {
                continue;
            }
            let clock = Clock::new(&attempts, &series);
            let folder =
                if rank == 0 { self.folder.clone() } else { self.folder.join(format!("rank-{rank}")) };
            let mut write = || -> io::Result<usize> {
                let file = match self.files.entry(rank) {
                    Entry::Occupied(file) => file.into_mut(),
                    Entry::Vacant(entry) => {
                        entry.insert(RankFile::create(&folder, (rank == 0).then_some(&job), clock.start())?)
                    }
                };
                let points = file.append(&clock, &series)?;
                if rank == 0 && job.state.is_final() {
                    let end = job.finished_at.map_or(clock.start(), unix_seconds);
                    Event::end(end, job.state == JobState::Succeeded).write(&mut file.out)?;
                }
                file.publish()?;
                Ok(points)
            };
            self.points += write().with_context(|| folder.display().to_string())?;
        }
        self.has_ended = job.state.is_final();
        Ok(())
    }
}

/// Returns the name of a job's folder: the job's name without characters that are invalid in paths, and the end of the id, because names
/// need not be unique.
fn folder_name(job: &Job) -> String {
    let name = job.name.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '-' });
    // At most 240 bytes in UTF-8, and 9 for the end of the id; file systems allow 255.
    let name: String = name.take(60).collect();
    let id = job.id.as_str();
    format!("{name}-{}", &id[id.len().saturating_sub(8)..])
}

/// The event file of one rank, which may grow.
struct RankFile {
    out: BufWriter<File>,
    /// Temporary path until the first [`Self::publish`] renames the file. `None` afterwards.
    partial: Option<PathBuf>,
    path: PathBuf,
    /// Attempt and step of the last point of each metric.
    last_points: BTreeMap<String, (u32, u64)>,
    /// Time of the last point, in seconds since 1970. Times are estimated anew in each round, and must not decrease in a file.
    last_time: f64,
}

impl RankFile {
    /// Creates the file. If `job` is given, the file begins with the job's settings. `start` is in seconds since 1970.
    fn create(folder: &Path, job: Option<&Job>, start: f64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        // TensorBoard must not read the unfinished file as an event file.
        let partial = folder.join("lockstep.part");
        let mut out = BufWriter::new(File::create(&partial)?);
        let version = Event { wall_time: start, file_version: Some(FILE_VERSION.into()), ..Event::default() };
        version.write(&mut out)?;
        if let Some(job) = job {
            let settings = match &job.external {
                Some(external) => external.config.clone().into(),
                // Converted through text, so that a 32-bit 0.1 stays 0.1.
                None => serde_json::from_str(&serde_json::to_string(&job.spec)?)?,
            };
            Event::start(start, to_hparams(settings)).write(&mut out)?;
        }
        let path = folder.join(format!("events.out.tfevents.{}.lockstep", start as u64));
        Ok(Self { out, partial: Some(partial), path, last_points: BTreeMap::new(), last_time: start })
    }

    /// Writes the points after the last written point of each metric. Returns their number.
    fn append(&mut self, clock: &Clock, series: &Series) -> io::Result<usize> {
        let mut points: Vec<(Point, &str)> = Vec::new();
        for (name, points_of_metric) in series {
            let last = self.last_points.get(name).copied();
            let is_new = |point: &Point| last.is_none_or(|last| (point.attempt, point.step) > last);
            let new = history::without_repeated(points_of_metric).into_iter().filter(is_new);
            points.extend(new.map(|point| (point, name.as_str())));
            if let Some(point) = points_of_metric.last() {
                self.last_points.insert(name.clone(), (point.attempt, point.step));
            }
        }
        // Points of the same step stay in the order of the metrics' names.
        points.sort_by_key(|(point, _)| point.step);
        for same_step in points.chunk_by(|(a, _), (b, _)| a.step == b.step) {
            let (first, _) = same_step[0];
            let value = same_step.iter().map(|(point, name)| SummaryValue {
                tag: (*name).to_owned(),
                simple_value: Some(point.value),
                ..SummaryValue::default()
            });
            let summary = Some(Summary { value: value.collect() });
            self.last_time = self.last_time.max(clock.time_of(first));
            let (wall_time, step) = (self.last_time, first.step as i64);
            Event { wall_time, step, file_version: None, summary }.write(&mut self.out)?;
        }
        Ok(points.len())
    }

    /// Makes the written events visible to TensorBoard.
    fn publish(&mut self) -> io::Result<()> {
        self.out.flush()?;
        match self.partial.take() {
            Some(partial) => fs::rename(partial, &self.path),
            None => Ok(()),
        }
    }
}

/// Returns the values of a specification by keys such as `train.lr`.
fn to_hparams(settings: Value) -> BTreeMap<String, Hparam> {
    let mut values = BTreeMap::new();
    flatten(String::new(), settings, &mut values);
    let hparam = |value| match value {
        Value::Bool(flag) => Hparam { flag: Some(flag), ..Hparam::default() },
        Value::Number(number) => Hparam { number: number.as_f64(), ..Hparam::default() },
        Value::String(text) => Hparam { text: Some(text), ..Hparam::default() },
        other => Hparam { text: Some(other.to_string()), ..Hparam::default() },
    };
    values.into_iter().map(|(key, value)| (key, hparam(value))).collect()
}

/// Start and end of an attempt.
#[derive(Deserialize)]
struct AttemptTimes {
    attempt: u32,
    started_at: Timestamp,
    ended_at: Option<Timestamp>,
}

fn unix_seconds(at: Timestamp) -> f64 {
    at.as_millisecond() as f64 / 1000.0
}

/// Estimates the time of each step by interpolation between the start and the end of its attempt, because the server does not store the
/// time of each point.
struct Clock(BTreeMap<u32, Span>);

/// Start and end of an attempt, in seconds since 1970, and its first and last step.
struct Span {
    start: f64,
    end: f64,
    first_step: u64,
    last_step: u64,
}

impl Clock {
    /// `series` has all points of the rank, including points that a later attempt has repeated.
    fn new(attempts: &[AttemptTimes], series: &Series) -> Self {
        let mut steps = BTreeMap::<u32, (u64, u64)>::new();
        for point in series.values().flatten() {
            let (first, last) = steps.entry(point.attempt).or_insert((point.step, point.step));
            (*first, *last) = (point.step.min(*first), point.step.max(*last));
        }
        let span = |times: &AttemptTimes| {
            let (first_step, last_step) = *steps.get(&times.attempt)?;
            let end = unix_seconds(times.ended_at.unwrap_or_else(Timestamp::now));
            Some((times.attempt, Span { start: unix_seconds(times.started_at), end, first_step, last_step }))
        };
        Self(attempts.iter().filter_map(span).collect())
    }

    fn start(&self) -> f64 {
        self.0.values().next().map_or(0.0, |span| span.start)
    }

    fn time_of(&self, point: Point) -> f64 {
        let Some(span) = self.0.get(&point.attempt) else { return self.start() };
        let (steps_done, step_count) =
            (point.step - span.first_step + 1, span.last_step - span.first_step + 1);
        span.start + (span.end - span.start) * (steps_done as f64 / step_count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::event_files::{self, HparamsData};
    use prost::Message;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn read(file: &Path) -> Vec<Event> {
        let mut events = Vec::new();
        assert_eq!(event_files::read(file, |event| events.push(event)).unwrap(), None);
        events
    }

    #[test]
    fn a_resumed_run_has_each_step_once_in_order_of_time() {
        let attempts = [
            AttemptTimes { attempt: 1, started_at: at(1000), ended_at: Some(at(1040)) },
            AttemptTimes { attempt: 2, started_at: at(2000), ended_at: Some(at(2030)) },
        ];
        let point = |attempt, step, value| Point { attempt, step, value };
        let loss = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]
            .map(|(attempt, step)| point(attempt, step, (10 * attempt) as f32 + step as f32));
        let accuracy = [point(2, 4, f32::NAN)];
        let series = Series::from([
            ("loss".to_owned(), loss.to_vec()),
            ("val_accuracy".to_owned(), accuracy.to_vec()),
        ]);
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::new(&attempts, &series);
        let mut file = RankFile::create(folder.path(), None, clock.start()).unwrap();
        assert_eq!(file.append(&clock, &series).unwrap(), 6);
        assert_eq!(file.append(&clock, &series).unwrap(), 0, "each point is written once");
        file.publish().unwrap();
        let events = read(&folder.path().join("events.out.tfevents.1000.lockstep"));
        assert_eq!(events[0].file_version.as_deref(), Some(FILE_VERSION));
        let rows = events[1..].iter().map(|event| (event.wall_time, event.step));
        assert!(rows.eq([(1010.0, 1), (1020.0, 2), (2010.0, 3), (2020.0, 4), (2030.0, 5)]), "{events:?}");
        let values = |event: &Event| {
            let values = event.summary.as_ref().unwrap().value.iter();
            values.map(|value| (value.tag.clone(), value.simple_value.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(values(&events[1]), [("loss".to_owned(), 11.0)]);
        let values = values(&events[4]);
        assert_eq!(values[0], ("loss".to_owned(), 24.0));
        assert!(values[1].0 == "val_accuracy" && values[1].1.is_nan(), "{values:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn settings_are_named_by_their_paths() {
        let spec = serde_json::json!({
            "name": "shoes", "train": {"lr": 0.1, "steps": 40, "nesterov": true, "ema_decay": null},
            "tags": ["a", "b"],
        });
        let event = Event::start(5.0, to_hparams(spec));
        let content = event.summary.unwrap().value[0].metadata.clone().unwrap().plugin_data.unwrap().content;
        let start = HparamsData::decode(&content[..]).unwrap().session_start_info.unwrap();
        let text = |text: &str| Hparam { text: Some(text.into()), ..Hparam::default() };
        let number = |number| Hparam { number: Some(number), ..Hparam::default() };
        let expected = BTreeMap::from([
            ("name".to_owned(), text("shoes")),
            ("tags".to_owned(), text(r#"["a","b"]"#)),
            ("train.lr".to_owned(), number(0.1)),
            ("train.nesterov".to_owned(), Hparam { flag: Some(true), ..Hparam::default() }),
            ("train.steps".to_owned(), number(40.0)),
        ]);
        assert_eq!(start.hparams, expected);
    }
}
