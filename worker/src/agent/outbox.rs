//! The unsent reports of an attempt. Records are read from the attempt's files, and sent from the first record that the
//! server does not have.

use super::{attempt::agent_events_path, state_dir::StoredAttempt};
use crate::report::{Tail, TailError, events_path};
use lockstep_protocol::agent::{Acknowledged, AttemptEvent, FromAgent, Source};
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Maximum number of unacknowledged reports per source, each of at most about a mebibyte.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum size of an attempt's unacknowledged records, which the server must keep in memory.
const MAX_IN_FLIGHT_BYTES: u64 = 16 << 20;
/// Minimum time between two reports of a rank while nobody watches the job, so that short steps result in few reports with many
/// points. While somebody watches the job, everything is reported at once.
const COLLECT_TIME: Duration = Duration::from_millis(250);
/// Maximum time for which a file that cannot be read (on an unreliable disk) may delay the end of its attempt.
const READ_RETRY_LIMIT: Duration = Duration::from_secs(60);

/// The reports of one attempt on one connection.
#[derive(Debug)]
pub(super) struct Outbox {
    ranks: Vec<Stream>,
    agent: Stream,
    /// Whether someone watched the job at the time of the server's last acknowledgement.
    is_watched: bool,
}

#[derive(Debug)]
struct Stream {
    source: Source,
    tail: Tail,
    /// The server has stored the records below this number.
    acknowledged: u64,
    /// The unacknowledged reports, oldest first. Each entry has the number after the report's last record, and its size in bytes.
    in_flight: VecDeque<(u64, u64)>,
    last_sent: Option<Instant>,
    /// The time since which the file cannot be read. `None` if it can be read.
    failing_since: Option<Instant>,
    /// Whether the file has been given up as unreadable. Nothing more is sent from it.
    is_given_up: bool,
}

impl Stream {
    fn new(stored_attempt: &StoredAttempt, source: Source, acknowledged: &[Acknowledged]) -> Self {
        let dir = stored_attempt.attempt_dir();
        let path = match source {
            Source::Rank(rank) => events_path(&dir, rank),
            Source::Agent => agent_events_path(stored_attempt),
        };
        let is_own = |a: &&Acknowledged| a.attempt == stored_attempt.start.attempt && a.source == source;
        let acknowledged = acknowledged.iter().find(is_own).map_or(0, |a| a.records);
        Self {
            source,
            tail: Tail::open(&path, acknowledged),
            acknowledged,
            in_flight: VecDeque::new(),
            last_sent: None,
            failing_since: None,
            is_given_up: false,
        }
    }

    /// The number of the next record to send, and the records from there on. `None` if there are none, a limit is
    /// reached, or the file cannot be read.
    fn next_report(&mut self, now: Instant) -> Option<(u64, Vec<AttemptEvent>)> {
        if self.is_given_up || self.in_flight.len() >= MAX_IN_FLIGHT {
            return None;
        }
        let first = self.tail.next_record();
        let offset = self.tail.offset();
        let error = match self.tail.poll() {
            Ok(events) => {
                self.failing_since = None;
                if events.is_empty() {
                    return None;
                }
                self.in_flight.push_back((self.tail.next_record(), self.tail.offset() - offset));
                self.last_sent = Some(now);
                return Some((first, events));
            }
            Err(error) => error,
        };
        let is_new = self.failing_since.is_none();
        let since = *self.failing_since.get_or_insert(now);
        if matches!(error, TailError::Damaged { .. })
            || now.saturating_duration_since(since) > READ_RETRY_LIMIT
        {
            tracing::error!(%error, "the records of this source cannot be read; giving up");
            self.is_given_up = true;
        } else if is_new {
            tracing::warn!(%error, "the records of this source cannot be read; retrying");
        }
        None
    }

    fn acknowledge(&mut self, records: u64) {
        self.acknowledged = self.acknowledged.max(records);
        while self.in_flight.front().is_some_and(|(end, _)| *end <= self.acknowledged) {
            self.in_flight.pop_front();
        }
    }

    fn bytes_in_flight(&self) -> u64 {
        self.in_flight.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Whether no record is left to be sent, after [`Stream::next_report`] has returned `None`.
    fn is_all_sent(&self) -> bool {
        self.is_given_up || self.failing_since.is_none() && self.in_flight.len() < MAX_IN_FLIGHT
    }
}

impl Outbox {
    /// Starts after the records of this attempt that the server has acknowledged.
    pub(super) fn new(stored_attempt: &StoredAttempt, acknowledged: &[Acknowledged]) -> Self {
        let rank = |(rank, _): &(u32, u32)| Stream::new(stored_attempt, Source::Rank(*rank), acknowledged);
        Self {
            ranks: stored_attempt.start.ranks.iter().map(rank).collect(),
            agent: Stream::new(stored_attempt, Source::Agent, acknowledged),
            is_watched: false,
        }
    }

    /// Appends the reports that can be sent `now` to `reports`. The agent's own records are sent when the attempt has
    /// ended and everything else is sent, because the last of them reports the end of the attempt.
    pub(super) fn fill(
        &mut self,
        stored_attempt: &StoredAttempt,
        is_over: bool,
        now: Instant,
        reports: &mut Vec<FromAgent>,
    ) {
        let attempt = &stored_attempt.start.attempt;
        let mut report = |source, (first, events)| {
            reports.push(FromAgent::Report { attempt: attempt.clone(), source, first, events });
        };
        let at_once = is_over || self.is_watched;
        let mut total_bytes: u64 = self.ranks.iter().map(Stream::bytes_in_flight).sum();
        let mut all_sent = true;
        for stream in &mut self.ranks {
            if !at_once
                && stream.last_sent.is_some_and(|sent| now.saturating_duration_since(sent) < COLLECT_TIME)
            {
                all_sent = false;
                continue;
            }
            let other_bytes = total_bytes - stream.bytes_in_flight();
            let has_room = |stream: &Stream| other_bytes + stream.bytes_in_flight() < MAX_IN_FLIGHT_BYTES;
            while has_room(stream)
                && let Some(batch) = stream.next_report(now)
            {
                report(stream.source, batch);
            }
            all_sent &= stream.is_all_sent() && has_room(stream);
            total_bytes = other_bytes + stream.bytes_in_flight();
        }
        if is_over && all_sent {
            while let Some(batch) = self.agent.next_report(now) {
                report(self.agent.source, batch);
            }
        }
    }

    pub(super) fn acknowledge(&mut self, acknowledged: &Acknowledged) {
        self.is_watched = acknowledged.watched;
        let streams = self.ranks.iter_mut().chain([&mut self.agent]);
        if let Some(stream) = streams.into_iter().find(|s| s.source == acknowledged.source) {
            stream.acknowledge(acknowledged.records);
        }
    }

    /// Whether the server has all records of an attempt that has ended. The agent's own records are sent last.
    pub(super) fn is_delivered(&self) -> bool {
        self.agent.acknowledged > 0 && self.ranks.iter().chain([&self.agent]).all(|s| s.in_flight.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Records;
    use lockstep_protocol::{
        agent::{Ending, StartAttempt},
        reason::FailureCode,
        spec::JobSpec,
    };

    fn stored_attempt(job_dir: &std::path::Path) -> StoredAttempt {
        let start = StartAttempt::local(JobSpec::default(), "/none", 2);
        let attempt = StoredAttempt { start, job_dir: job_dir.into() };
        std::fs::create_dir_all(attempt.attempt_dir()).unwrap();
        attempt
    }

    /// The source, the first record and the number of records of each report that is sent now.
    fn sent(outbox: &mut Outbox, attempt: &StoredAttempt, is_over: bool) -> Vec<(Source, u64, usize)> {
        sent_at(outbox, attempt, is_over, Instant::now())
    }

    fn sent_at(
        outbox: &mut Outbox,
        attempt: &StoredAttempt,
        is_over: bool,
        now: Instant,
    ) -> Vec<(Source, u64, usize)> {
        let mut reports = Vec::new();
        outbox.fill(attempt, is_over, now, &mut reports);
        let report = |report: FromAgent| match report {
            FromAgent::Report { source, first, events, .. } => (source, first, events.len()),
            other => panic!("{other:?}"),
        };
        reports.into_iter().map(report).collect()
    }

    fn stored(attempt: &StoredAttempt, source: Source, records: u64) -> Acknowledged {
        Acknowledged { attempt: attempt.start.attempt.clone(), source, records, watched: false }
    }

    #[test]
    fn an_unreadable_file_delays_the_end_without_loss() {
        let dir = tempfile::tempdir().unwrap();
        let attempt = stored_attempt(dir.path());
        let path = events_path(&attempt.attempt_dir(), 0);
        let mut records = Records::append_to(&path).unwrap();
        records.append(&AttemptEvent::CheckpointRemoved { epoch: 1, step: 1 }).unwrap();
        let mut agent = Records::append_to(&agent_events_path(&attempt)).unwrap();
        agent.append(&AttemptEvent::Ended(Ending::Stopped)).unwrap();
        // A folder in place of the file: it can be opened, but reading it fails (for root as well).
        let aside = dir.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        let mut outbox = Outbox::new(&attempt, &[]);
        assert_eq!(sent(&mut outbox, &attempt, true), [], "the end waits for earlier reports");

        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        assert_eq!(sent(&mut outbox, &attempt, true), [(Source::Rank(0), 0, 1), (Source::Agent, 0, 1)]);
    }

    #[test]
    fn a_slow_server_limits_the_reports_in_flight() {
        let dir = tempfile::tempdir().unwrap();
        let attempt = stored_attempt(dir.path());
        let mut records = Records::append_to(&events_path(&attempt.attempt_dir(), 0)).unwrap();
        let mut outbox = Outbox::new(&attempt, &[]);
        let mut count = 0;
        for step in 0..20 {
            records.append(&AttemptEvent::CheckpointRemoved { epoch: 1, step }).unwrap();
            count += sent(&mut outbox, &attempt, true).len();
        }
        assert_eq!(count, MAX_IN_FLIGHT);
        outbox.acknowledge(&stored(&attempt, Source::Rank(0), 8));
        // Records that arrived meanwhile are sent together.
        assert_eq!(sent(&mut outbox, &attempt, true), [(Source::Rank(0), 8, 12)]);
    }

    #[test]
    fn points_are_collected_unless_the_job_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let attempt = stored_attempt(dir.path());
        let mut records = Records::append_to(&events_path(&attempt.attempt_dir(), 0)).unwrap();
        let mut outbox = Outbox::new(&attempt, &[]);
        let begin = Instant::now();
        let mut step = 0;
        // The reports sent after this number of milliseconds, with one more record each time.
        let mut sent = |outbox: &mut Outbox, after: u64| {
            step += 1;
            records.append(&AttemptEvent::CheckpointRemoved { epoch: 1, step }).unwrap();
            let now = begin + Duration::from_millis(after);
            sent_at(outbox, &attempt, false, now)
                .into_iter()
                .map(|(_, first, records)| (first, records))
                .collect::<Vec<_>>()
        };
        assert_eq!(sent(&mut outbox, 0), [(0, 1)], "the first at once");
        assert_eq!(sent(&mut outbox, 20), []);
        assert_eq!(sent(&mut outbox, 249), []);
        assert_eq!(sent(&mut outbox, 250), [(1, 3)], "the others together");
        assert_eq!(sent(&mut outbox, 600), [(4, 1)], "slow steps at once");
        outbox.acknowledge(&Acknowledged { watched: true, ..stored(&attempt, Source::Rank(0), 5) });
        assert_eq!(sent(&mut outbox, 620), [(5, 1)]);
        assert_eq!(sent(&mut outbox, 640), [(6, 1)]);
        outbox.acknowledge(&stored(&attempt, Source::Rank(0), 7));
        assert_eq!(sent(&mut outbox, 660), []);
    }

    #[test]
    fn bytes_in_flight_are_limited_per_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let mut attempt = stored_attempt(dir.path());
        attempt.start.ranks = (0..4).map(|rank| (rank, rank)).collect();
        let text = "x".repeat(1 << 20);
        for rank in 0..4 {
            let mut records = Records::append_to(&events_path(&attempt.attempt_dir(), rank)).unwrap();
            for step in 0..6 {
                let reason = text.clone();
                let failed = AttemptEvent::RankFailed {
                    rank,
                    step,
                    reason,
                    code: FailureCode::Other,
                    retriable: true,
                    secondary: false,
                    unreachable: Vec::new(),
                };
                records.append(&failed).unwrap();
            }
        }
        let mut outbox = Outbox::new(&attempt, &[]);
        let first = sent(&mut outbox, &attempt, true);
        // Each report is a little larger than a mebibyte.
        assert_eq!(first.len() as u64, MAX_IN_FLIGHT_BYTES >> 20);
        assert_eq!(first.last(), Some(&(Source::Rank(2), 3, 1)));
        assert_eq!(sent(&mut outbox, &attempt, true), []);
        outbox.acknowledge(&stored(&attempt, Source::Rank(0), 2));
        let next = sent(&mut outbox, &attempt, true);
        assert_eq!(next, [(Source::Rank(2), 4, 1), (Source::Rank(2), 5, 1)]);
        for rank in 0..3 {
            outbox.acknowledge(&stored(&attempt, Source::Rank(rank), 6));
        }
        assert_eq!(sent(&mut outbox, &attempt, true).len(), 6, "no report is left out");
    }
}
