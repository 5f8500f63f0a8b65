//! Means of whole minutes, which the database keeps.

use super::point::{Point, Sums};
use crate::store::MinuteRow;
use jiff::Timestamp;

/// The means that a row of the database holds, as a point at the end of the row's minute. `None` if another version of the server has
/// written the row in another format.
pub(crate) fn point_of(row: &MinuteRow) -> Option<Point> {
    let end = row.minute.checked_add(1)?.checked_mul(60)?;
    Point::decode(Timestamp::from_second(end).ok()?, &row.data)
}

/// The minute that contains a time, counted from 1970.
pub(crate) fn minute_of(at: Timestamp) -> i64 {
    at.as_second().div_euclid(60)
}

/// The minute to which points are being added.
#[derive(Debug)]
pub(crate) struct Minute {
    /// The number of the minute ([`minute_of`]).
    minute: i64,
    point_count: u32,
    sums: Sums,
}

impl Minute {
    pub(crate) fn new(at: Timestamp) -> Self {
        Self { minute: minute_of(at), point_count: 0, sums: Sums::default() }
    }

    /// Adds a point. If the point is in a new minute, returns the previous minute.
    pub(crate) fn add(&mut self, agent: &str, point: &Point) -> Option<MinuteRow> {
        let finished = self.finish_if_over(agent, point.at);
        self.sums.add(point);
        self.point_count += 1;
        finished
    }

    /// Ends the minute if `now` is in another minute, and begins the minute of `now`. Returns the minute if it has ended and has points.
    pub(crate) fn finish_if_over(&mut self, agent: &str, now: Timestamp) -> Option<MinuteRow> {
        if minute_of(now) == self.minute {
            return None;
        }
        let finished = std::mem::replace(self, Self::new(now));
        let data = finished.sums.mean(now).encode();
        (finished.point_count > 0).then(|| MinuteRow {
            agent_id: agent.to_owned(),
            minute: finished.minute,
            data,
        })
    }
}
