//! Reads every point of a job's metrics.

use super::api::Api;
use anyhow::Context;
use futures_util::StreamExt;
use std::collections::BTreeMap;

/// A point of one metric of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) attempt: u32,
    pub(super) step: u64,
    /// The recorded value, or NaN if it was not finite.
    pub(super) value: f32,
}

/// Returns all points of a rank, by the metric's name. The points of a metric are in the order of attempts and steps.
///
/// # Errors
/// See [`Api::get`]. Also if the connection breaks.
pub(super) async fn read_points(
    api: &Api,
    job: &str,
    rank: u32,
) -> anyhow::Result<BTreeMap<String, Vec<Point>>> {
    let path = format!("/jobs/{job}/metrics.csv?ranks={rank}");
    let mut body = api.get_response(&path).await?.bytes_stream();
    let (mut series, mut buffer) = (BTreeMap::<String, Vec<Point>>::new(), Vec::<u8>::new());
    while let Some(chunk) = body.next().await {
        buffer.extend_from_slice(&chunk.context("the connection broke during the download; try again")?);
        let lines_end = buffer.iter().rposition(|byte| *byte == b'\n').map_or(0, |index| index + 1);
        for line in std::str::from_utf8(&buffer[..lines_end])?.lines().filter(|line| *line != HEADER) {
            let (name, point) = parse_line(line)
                .with_context(|| format!("the server's metrics have an invalid line {line:?}"))?;
            series.entry(name).or_default().push(point);
        }
        buffer.drain(..lines_end);
    }
    for points in series.values_mut() {
        points.sort_by_key(|point| (point.attempt, point.step));
    }
    Ok(series)
}

/// The header of the server's CSV.
const HEADER: &str = "attempt,rank,name,step,value";

/// Parses a line of CSV. A name may be quoted as in RFC 4180.
fn parse_line(line: &str) -> Option<(String, Point)> {
    let (attempt, rest) = line.split_once(',')?;
    let (_rank, rest) = rest.split_once(',')?;
    let (rest, value) = rest.rsplit_once(',')?;
    let (name, step) = rest.rsplit_once(',')?;
    let point =
        Point { attempt: attempt.parse().ok()?, step: step.parse().ok()?, value: value.parse().ok()? };
    let quoted = name.strip_prefix('"').and_then(|name| name.strip_suffix('"'));
    Some((quoted.map_or_else(|| name.to_owned(), |name| name.replace("\"\"", "\"")), point))
}

/// Keeps one point per step: leaves out points that a later attempt has repeated. `points` must be in the order of attempts and steps.
pub(super) fn without_repeated(points: &[Point]) -> Vec<Point> {
    let mut unique: Vec<Point> = Vec::with_capacity(points.len());
    for point in points {
        while unique.last().is_some_and(|last| last.step >= point.step) {
            unique.pop();
        }
        unique.push(*point);
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(attempt: u32, step: u64) -> Point {
        Point { attempt, step, value: step as f32 }
    }

    #[test]
    fn csv_lines_are_parsed_with_any_metric_name() {
        assert_eq!(
            parse_line("2,1,loss,41,0.5"),
            Some(("loss".into(), Point { attempt: 2, step: 41, value: 0.5 }))
        );
        assert_eq!(
            parse_line("1,0,\"a,\"\"b\",3,1e-7").map(|(name, point)| (name, point.value)),
            Some(("a,\"b".into(), 1e-7))
        );
        assert!(parse_line("1,0,loss,3,NaN").is_some_and(|(_, point)| point.value.is_nan()));
        for wrong in ["", "1,0,loss,3", "1,0,loss,three,1", HEADER] {
            assert_eq!(parse_line(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn later_attempts_replace_the_steps_that_they_repeat() {
        let points = |all: &[(u32, u64)]| all.iter().map(|&(a, s)| point(a, s)).collect::<Vec<_>>();
        for (all, remaining) in [
            (&[(1, 1), (1, 2)][..], &[(1, 1), (1, 2)][..]),
            (&[(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)], &[(1, 1), (2, 2), (2, 3)]),
            (&[(1, 1), (1, 2), (2, 3)], &[(1, 1), (1, 2), (2, 3)]),
            (&[(1, 5), (2, 3), (3, 4)], &[(2, 3), (3, 4)]),
            (&[], &[]),
        ] {
            assert_eq!(without_repeated(&points(all)), points(remaining), "{all:?}");
        }
    }
}
