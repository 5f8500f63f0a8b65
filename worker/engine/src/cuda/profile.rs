//! Profiling of a step on request: each call is timed with two events.

use super::{
    command::Part,
    device::{Event, Stream},
    error::{CudaError, Result},
};
use lockstep_host::lock;
use std::sync::Mutex;

#[derive(Debug, Clone)]
pub(super) struct TimedCall {
    pub(super) part: Part,
    pub(super) millis: f64,
}

/// A call whose time is not yet read.
struct RecordedCall {
    part: Part,
    begin: Event,
    end: Event,
}

/// The calls since [`Profile::begin`].
struct ActiveProfile {
    /// The part of the step to which the next call belongs.
    current_part: Part,
    calls: Vec<RecordedCall>,
}

/// The timed calls; `None` while profiling is off.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<ActiveProfile>>);

impl Profile {
    /// Runs `call`, which launches work on `stream`, and times that work if profiling is on.
    pub(super) fn time<T, E: From<CudaError>>(
        &self,
        stream: Stream,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut profile = lock(&self.0);
        let Some(ActiveProfile { current_part, calls }) = profile.as_mut() else {
            drop(profile);
            return call();
        };
        let (begin, end) = (Event::timed()?, Event::timed()?);
        begin.record(stream)?;
        let result = call()?;
        end.record(stream)?;
        calls.push(RecordedCall { part: *current_part, begin, end });
        Ok(result)
    }

    /// Assigns the following calls to `part`.
    pub(super) fn begin_part(&self, part: Part) {
        if let Some(profile) = lock(&self.0).as_mut() {
            profile.current_part = part;
        }
    }

    pub(super) fn begin(&self) {
        *lock(&self.0) = Some(ActiveProfile { current_part: Part::Begin, calls: Vec::new() });
    }

    /// Stops profiling and returns the calls since [`Profile::begin`].
    pub(super) fn end(&self) -> Result<Vec<TimedCall>> {
        let calls = lock(&self.0).take().map(|profile| profile.calls).unwrap_or_default();
        let read_time = |RecordedCall { part, begin, end }: RecordedCall| {
            Ok(TimedCall { part, millis: f64::from(begin.millis_to(&end)?) })
        };
        calls.into_iter().map(read_time).collect()
    }
}
