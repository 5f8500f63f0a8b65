//! The pictures of a batch that the device decodes, and the groups in which threads claim them.

use crate::DataError;
use lockstep_host::lock;
use std::sync::{Mutex, PoisonError};

/// A queue of pictures, by their indices in the batch. Each picture is claimed once.
pub(super) struct Queue<'a> {
    /// The pictures that no thread has claimed yet, in ascending order.
    unclaimed: Mutex<&'a [usize]>,
    /// The error of the first failed picture in the order of the batch, so that the reported error does not depend on
    /// timing.
    first_error: Mutex<Option<(usize, DataError)>>,
}

impl<'a> Queue<'a> {
    pub(super) fn new(numbers: &'a [usize]) -> Self {
        Self { unclaimed: Mutex::new(numbers), first_error: Mutex::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.unclaimed).is_empty()
    }

    /// Claims up to `max` pictures.
    pub(super) fn claim(&self, max: usize) -> &'a [usize] {
        let mut unclaimed = lock(&self.unclaimed);
        let all = *unclaimed;
        let (claimed, rest) = all.split_at(max.min(all.len()));
        *unclaimed = rest;
        claimed
    }

    /// Records the outcome for a group of claimed pictures.
    pub(super) fn record(&self, claimed: &[usize], outcome: Result<(), DataError>) {
        if let (Some(number), Err(error)) = (claimed.first(), outcome) {
            let mut first = lock(&self.first_error);
            if first.as_ref().is_none_or(|(other, _)| number < other) {
                *first = Some((*number, error));
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
        let queue = Queue::new(&[3, 5, 8, 9, 11]);
        assert_eq!(queue.claim(2), [3, 5]);
        assert!(!queue.is_empty());
        assert_eq!(queue.claim(usize::MAX), [8, 9, 11]);
        assert!(queue.is_empty());
        assert_eq!(queue.claim(1), [] as [usize; 0]);
        queue.into_outcome().unwrap();
    }

    #[test]
    fn the_first_error_of_the_batch_is_reported() {
        let queue = Queue::new(&[]);
        let wrong = |detail: &str| Err(DataError::Invalid(detail.into()));
        queue.record(&[4, 5], wrong("the fifth"));
        queue.record(&[2, 3], wrong("the third"));
        queue.record(&[0, 1], Ok(()));
        queue.record(&[7], wrong("the eighth"));
        assert!(queue.into_outcome().unwrap_err().to_string().contains("the third"));
    }
}
