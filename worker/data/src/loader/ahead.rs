//! Threads that prepare batches ahead of the training step.

use super::batch::Batch;
use crate::DataError;
use std::{
    sync::{Arc, mpsc},
    thread,
};

/// Runs `make(0)`, `make(1)`, ... on `threads` threads, and returns the results in order. Each thread works up to
/// `ahead` results ahead. Dropping the iterator ends the threads.
pub(super) fn prepare_ahead(
    count: usize,
    threads: usize,
    ahead: usize,
    make: impl Fn(usize) -> Result<Batch, DataError> + Send + Sync + 'static,
) -> Box<dyn Iterator<Item = Result<Batch, DataError>> + Send> {
    let threads = threads.clamp(1, count.max(1));
    let make = Arc::new(make);
    let receivers: Vec<_> = (0..threads)
        .map(|index| {
            let (sender, receiver) = mpsc::sync_channel(ahead);
            let make = make.clone();
            let work = move || {
                for number in (index..count).step_by(threads) {
                    let batch = make(number);
                    let has_failed = batch.is_err();
                    if sender.send(batch).is_err() || has_failed {
                        break;
                    }
                }
            };
            let started = thread::Builder::new().name(format!("data {index}")).spawn(work);
            (receiver, started.err())
        })
        .collect();
    let mut number = 0;
    Box::new(std::iter::from_fn(move || {
        if number == count {
            return None;
        }
        let (receiver, spawn_error) = &receivers[number % threads];
        number += 1;
        Some(receiver.recv().unwrap_or_else(|_| {
            let why = spawn_error
                .as_ref()
                .map_or_else(|| "a thread that prepares data ended".to_owned(), ToString::to_string);
            number = count;
            Err(DataError::Invalid(why))
        }))
    }))
}
