//! Where a step's time goes: each call between two events, when somebody asks.

use super::{
    device::{Event, Stream},
    error::CudaError,
};
use std::sync::{Mutex, PoisonError};

/// Calls that were timed, in order; `None` while nobody asks.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<Vec<(String, Event, Event)>>>);

impl Profile {
    /// Runs `call`, which starts work on `stream`, and times that work if somebody asks.
    pub(super) fn around<T, E: From<CudaError>>(
        &self,
        stream: Stream,
        name: impl FnOnce() -> String,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(calls) = asked.as_mut() else {
            drop(asked);
            return call();
        };
        let (begin, end) = (Event::new(true)?, Event::new(true)?);
        begin.record(stream)?;
        let result = call()?;
        end.record(stream)?;
        calls.push((name(), begin, end));
        Ok(result)
    }

    /// From now on calls are timed.
    pub(super) fn begin(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Milliseconds of each call since [`Profile::begin`].
    pub(super) fn end(&self) -> Result<Vec<(String, f64)>, CudaError> {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        calls.into_iter().map(|(name, begin, end)| Ok((name, f64::from(begin.millis_to(&end)?)))).collect()
    }
}
