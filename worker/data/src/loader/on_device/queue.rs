//! The pictures of a batch that the device decodes, and the groups in which threads claim them.

use crate::DataError;
use lockstep_host::lock;
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// A queue of pictures, by their indices in the batch. Each picture is claimed once.
pub(super) struct Queue {
    numbers: Vec<usize>,
    /// The range in `numbers` that no thread has claimed yet.
    unclaimed: Mutex<Range<usize>>,
    /// The error of the first failed picture in the order of the batch, so that the reported error does not depend on
    /// timing.
    first_error: Mutex<Option<(usize, DataError)>>,
}

impl Queue {
    pub(super) fn new(numbers: Vec<usize>) -> Self {
        Self { unclaimed: Mutex::new(0..numbers.len()), numbers, first_error: Mutex::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.unclaimed).is_empty()
    }

    /// Claims up to `max` pictures, and returns their range in `numbers`.
    pub(super) fn claim(&self, max: usize) -> (usize, usize) {
        let mut unclaimed = lock(&self.unclaimed);
        let from = unclaimed.start;
        unclaimed.start += max.min(unclaimed.len());
        (from, unclaimed.start)
    }

    pub(super) fn numbers(&self, (from, to): (usize, usize)) -> &[usize] {
        &self.numbers[from..to]
    }

    /// Records the outcome for the group that begins at index `start` of the queue.
    pub(super) fn record(&self, start: usize, outcome: Result<(), DataError>) {
        if let Err(error) = outcome {
            let mut first = lock(&self.first_error);
            if first.as_ref().is_none_or(|(other, _)| start < *other) {
                *first = Some((start, error));
            }
        }
    }

    pub(super) fn into_outcome(self) -> Result<(), DataError> {
        let first = self.first_error.into_inner().unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(()), |(_, error)| Err(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_claimed_once() {
        let queue = Queue::new(vec![3, 5, 8, 9, 11]);
        assert_eq!(queue.numbers(queue.claim(2)), [3, 5]);
        assert!(!queue.is_empty());
        assert_eq!(queue.numbers(queue.claim(usize::MAX)), [8, 9, 11]);
        assert!(queue.is_empty());
        assert_eq!(queue.numbers(queue.claim(1)), [] as [usize; 0]);
        queue.into_outcome().unwrap();
    }

    #[test]
    fn the_first_error_of_the_batch_is_reported() {
        let queue = Queue::new((0..9).collect());
        let wrong = |detail: &str| Err(DataError::Invalid(detail.into()));
        queue.record(4, wrong("the fifth"));
        queue.record(2, wrong("the third"));
        queue.record(1, Ok(()));
        queue.record(7, wrong("the eighth"));
        assert!(queue.into_outcome().unwrap_err().to_string().contains("the third"));
    }
}
