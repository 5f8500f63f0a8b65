//! W&B's local files: `run-ID.wandb` in the folder of each run is a log in LevelDB's format
//! (<https://github.com/google/leveldb/blob/main/doc/log_format.md>, with a header and CRC-32) of messages of
//! `wandb/proto/wandb_internal.proto`. Fields that are not read are left out; a `oneof` is several optional fields.

use super::{Failure, Parts, Run, check_folder, collect_numbers, derive_id, file_name, sorted_entries};
use crate::cli::usage_error;
use anyhow::Context;
use crc::{CRC_32_ISO_HDLC, Crc};
use prost::Message;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

static CHECKSUM: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
/// The file's header: `:W&B`, a magic number and version 0.
const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
/// Size of a block of the log.
const BLOCK_BYTES: usize = 32 << 10;
/// Size of the head of each part of a record: checksum (4 bytes), length (2 bytes) and kind (1 byte).
const PART_HEAD_BYTES: usize = 7;

#[derive(Clone, PartialEq, Message)]
struct Record {
    #[prost(message, optional, tag = "2")]
    history: Option<History>,
    #[prost(message, optional, tag = "3")]
    summary: Option<Items>,
    #[prost(message, optional, tag = "5")]
    config: Option<Items>,
    #[prost(message, optional, tag = "6")]
    files: Option<Files>,
    #[prost(message, optional, tag = "7")]
    stats: Option<Skipped>,
    #[prost(message, optional, tag = "8")]
    artifact: Option<Skipped>,
    #[prost(message, optional, tag = "13")]
    output: Option<Skipped>,
    #[prost(message, optional, tag = "17")]
    run: Option<RunRecord>,
    #[prost(message, optional, tag = "18")]
    exit: Option<Exit>,
}

/// A message whose fields are not read.
#[derive(Clone, PartialEq, Message)]
struct Skipped {}

#[derive(Clone, PartialEq, Message)]
struct History {
    #[prost(message, repeated, tag = "1")]
    item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
struct Step {
    #[prost(int64, tag = "1")]
    num: i64,
}

/// `HistoryItem`, `ConfigItem` and `SummaryItem`.
#[derive(Clone, PartialEq, Message)]
struct Item {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, repeated, tag = "2")]
    nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    value_json: String,
}

/// `ConfigRecord` and `SummaryRecord`.
#[derive(Clone, PartialEq, Message)]
struct Items {
    #[prost(message, repeated, tag = "1")]
    update: Vec<Item>,
    #[prost(message, repeated, tag = "2")]
    remove: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
struct Files {
    #[prost(message, repeated, tag = "1")]
    files: Vec<Skipped>,
}

#[derive(Clone, PartialEq, Message)]
struct RunRecord {
    #[prost(string, tag = "1")]
    run_id: String,
    #[prost(string, tag = "2")]
    entity: String,
    #[prost(string, tag = "3")]
    project: String,
    #[prost(message, optional, tag = "4")]
    config: Option<Items>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Items>,
    #[prost(string, tag = "6")]
    run_group: String,
    #[prost(string, tag = "7")]
    job_type: String,
    #[prost(string, tag = "8")]
    display_name: String,
    #[prost(string, tag = "9")]
    notes: String,
    #[prost(string, repeated, tag = "10")]
    tags: Vec<String>,
    #[prost(message, optional, tag = "17")]
    start_time: Option<Time>,
}

#[derive(Clone, PartialEq, Message)]
struct Time {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Exit {
    #[prost(int32, tag = "1")]
    exit_code: i32,
}

impl Item {
    fn name(&self) -> String {
        if self.nested_key.is_empty() { self.key.clone() } else { self.nested_key.join(".") }
    }

    /// Parses the value. Python writes NaN and infinities, which JSON does not have and which become text.
    fn value(&self) -> Value {
        serde_json::from_str(&self.value_json).unwrap_or_else(|_| self.value_json.as_str().into())
    }
}

/// Returns the runs of a folder: the folder of a run, a folder that contains such folders, or the parent of `wandb`.
pub(super) fn parts(root: &Path) -> anyhow::Result<Parts> {
    check_folder(root)?;
    let mut folders = vec![root.to_owned()];
    folders.extend(sorted_entries(root)?);
    if let Ok(inner) = sorted_entries(&root.join("wandb")) {
        folders.extend(inner);
    }
    // Resolved paths in a set, because `latest-run` is a link to another folder in the list.
    let mut files = BTreeSet::<PathBuf>::new();
    for folder in folders.iter().filter(|folder| folder.is_dir()) {
        let logs = sorted_entries(folder)?
            .into_iter()
            .filter(|path| path.extension().is_some_and(|extension| extension == "wandb"));
        files.extend(logs.filter_map(|path| path.canonicalize().ok()));
    }
    if files.is_empty() {
        let detail = format!("{} has no runs of W&B: no folder in it has a file *.wandb", root.display());
        return Err(usage_error(detail));
    }
    let read = |file: PathBuf| (file.display().to_string(), read_run(&file).map(|run| vec![run]));
    Ok(Box::new(files.into_iter().map(read)))
}

fn read_run(file: &Path) -> anyhow::Result<Run> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    anyhow::ensure!(bytes.starts_with(&HEADER), "the file does not begin as a log of W&B does");
    let mut run = Run { failure: Some(Failure::Unfinished), ..Run::default() };
    let is_complete = for_each_record(&bytes, |data| match Record::decode(data) {
        Ok(record) => add_record(&mut run, record),
        Err(_) => run.leave_out("records that cannot be read", 1),
    });
    if !is_complete {
        run.leave_out("damaged or incomplete records and all later records", 1);
    }
    // If the log has no description of the run, the run's id is taken from the file's name.
    if run.id.is_empty() {
        let name = file_name(file);
        run.id = derive_id("wandb", &[name.as_bytes()]);
        run.name = name.trim_end_matches(".wandb").trim_start_matches("run-").to_owned();
    }
    Ok(run)
}

/// Calls `on_record` with each record of a log. Returns whether all records are complete.
fn for_each_record(bytes: &[u8], mut on_record: impl FnMut(&[u8])) -> bool {
    let (mut offset, mut record) = (HEADER.len(), Vec::new());
    loop {
        let left_in_block = BLOCK_BYTES - offset % BLOCK_BYTES;
        if left_in_block < PART_HEAD_BYTES {
            offset += left_in_block;
        }
        if offset >= bytes.len() {
            return record.is_empty();
        }
        let Some((head, rest)) = bytes[offset..].split_at_checked(PART_HEAD_BYTES) else { return false };
        let length = usize::from(u16::from_le_bytes([head[4], head[5]]));
        let Some(data) = rest.get(..length) else { return false };
        let mut digest = CHECKSUM.digest();
        digest.update(&head[6..]);
        digest.update(data);
        if digest.finalize().to_le_bytes() != head[..4] {
            return false;
        }
        offset += PART_HEAD_BYTES + length;
        record.extend_from_slice(data);
        match head[6] {
            // The whole record, or its last part.
            1 | 4 => {
                on_record(&record);
                record.clear();
            }
            // The record's first part, or a part in the middle.
            2 | 3 => {}
            _ => return false,
        }
    }
}

fn add_record(run: &mut Run, record: Record) {
    if let Some(description) = record.run {
        add_description(run, description);
    }
    merge(&mut run.config, record.config);
    merge(&mut run.summary, record.summary);
    if let Some(history) = record.history {
        add_history(run, &history);
    }
    if let Some(exit) = record.exit {
        run.failure = (exit.exit_code != 0).then_some(Failure::Failed);
    }
    run.leave_out("files", record.files.map_or(0, |files| files.files.len() as u64));
    run.leave_out("artifacts", record.artifact.is_some().into());
    run.leave_out("measurements of the machine", record.stats.is_some().into());
    run.leave_out("lines of output", record.output.is_some().into());
}

fn add_description(run: &mut Run, record: RunRecord) {
    let id_parts = [&record.entity, &record.project, &record.run_id];
    run.id = derive_id("wandb", &id_parts.map(|part| part.as_bytes()));
    run.name = if record.display_name.is_empty() { record.run_id } else { record.display_name };
    run.project = Some(record.project).filter(|project| !project.is_empty());
    run.notes = record.notes;
    run.tags = record.tags;
    run.tags.extend([record.run_group, record.job_type].into_iter().filter(|tag| !tag.is_empty()));
    if let Some(Time { seconds, nanos }) = record.start_time {
        run.started_at = Some(seconds.saturating_mul(1000).saturating_add(i64::from(nanos) / 1_000_000));
        run.ended_at = run.ended_at.max(run.started_at);
    }
    merge(&mut run.config, record.config);
    merge(&mut run.summary, record.summary);
}

/// Merges settings or results. Leaves out W&B's own names, which begin with `_`, and media, which are files.
fn merge(values: &mut serde_json::Map<String, Value>, items: Option<Items>) {
    let Some(Items { update, remove }) = items else { return };
    for item in update {
        let (name, value) = (item.name(), item.value());
        if !name.starts_with('_') && value.get("_type").is_none() {
            values.insert(name, value);
        }
    }
    for item in remove {
        values.remove(&item.name());
    }
}

fn add_history(run: &mut Run, history: &History) {
    let number = |name: &str| {
        let item = history.item.iter().find(|item| item.name() == name)?;
        item.value().as_f64()
    };
    let step = history.step.as_ref().map(|step| step.num).or_else(|| number("_step").map(|step| step as i64));
    let at = number("_timestamp").map(|secs| (secs * 1000.0) as i64);
    run.ended_at = run.ended_at.max(at);
    for item in &history.item {
        let name = item.name();
        if name.starts_with('_') {
            continue;
        }
        let mut numbers = Vec::new();
        let not_numbers = collect_numbers(&name, &item.value(), &mut numbers);
        run.leave_out("logged values that are not numbers", not_numbers);
        for (name, value) in numbers {
            run.add_point(step.unwrap_or(0), at, &name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends a record as W&B's writer does.
    fn append(log: &mut Vec<u8>, mut data: &[u8]) {
        let mut is_first = true;
        loop {
            let left_in_block = BLOCK_BYTES - log.len() % BLOCK_BYTES;
            if left_in_block < PART_HEAD_BYTES {
                log.extend(vec![0; left_in_block]);
                continue;
            }
            let (part, rest) = data.split_at(data.len().min(left_in_block - PART_HEAD_BYTES));
            let kind = match (is_first, rest.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let mut digest = CHECKSUM.digest();
            digest.update(&[kind]);
            digest.update(part);
            log.extend(digest.finalize().to_le_bytes());
            log.extend((part.len() as u16).to_le_bytes());
            log.push(kind);
            log.extend(part);
            (data, is_first) = (rest, false);
            if data.is_empty() {
                return;
            }
        }
    }

    #[test]
    fn records_may_span_blocks_and_a_truncated_end_is_detected() {
        let all: Vec<Vec<u8>> = [1, 40_000, 0, 100_000, 5, 32_000, 700]
            .iter()
            .enumerate()
            .map(|(n, size)| vec![n as u8; *size])
            .collect();
        let mut log = HEADER.to_vec();
        all.iter().for_each(|data| append(&mut log, data));
        let read = |log: &[u8]| {
            let mut found = Vec::new();
            (for_each_record(log, |data| found.push(data.to_vec())), found)
        };
        assert_eq!(read(&log), (true, all.clone()));
        assert_eq!(read(&log[..log.len() - 1]), (false, all[..6].to_vec()));
        let mut damaged = log.clone();
        damaged[60_000] ^= 1;
        assert!(!read(&damaged).0);
    }
}
