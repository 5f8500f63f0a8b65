//! All-reduces of a step. Gradients travel in a thread of their own while backward runs.
//!
//! Every rank must call the same collectives of a group in the same order. Gradient buckets take one
//! group, in the order in which backward completes them; statistics of batch norms take the group
//! beside it and are waited for where they are needed. A communicator with no group beside it gets
//! everything through the thread's one queue, which the engine fills in program order; a bucket is
//! then queued right after the next statistics have come back (not before them, where they would
//! wait behind it), and so has the whole next convolution's backward pass to hide behind.

use crate::comm::{CommError, Communicator, Reduction};
use std::{
    collections::VecDeque,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// Gradients of some parameters, before or after their sum over the ranks.
#[derive(Debug, Clone)]
pub(super) enum Bucket {
    Single(Vec<f32>),
    /// See [`super::gradient`].
    Exact(Vec<f64>),
}

impl Default for Bucket {
    fn default() -> Self {
        Bucket::Single(Vec::new())
    }
}

enum Request {
    Statistics(Vec<f64>),
    Bucket(Bucket),
}

/// How a rank's values become those of all.
enum Way {
    /// One rank: its values are the sum. Buckets wait here to be taken back.
    Alone(VecDeque<Bucket>),
    /// A thread for buckets, and for statistics where there is no second group.
    Group { thread: Thread, beside: Option<Arc<dyn Communicator>> },
}

struct Thread {
    requests: mpsc::Sender<Request>,
    statistics: mpsc::Receiver<Result<Vec<f64>, CommError>>,
    buckets: mpsc::Receiver<Result<Bucket, CommError>>,
}

/// Sums over the ranks, and how long this one waited for them.
pub(super) struct Reducer {
    way: Way,
    waited: Duration,
}

impl Reducer {
    pub(super) fn new(comm: Arc<dyn Communicator>) -> std::io::Result<Self> {
        let way = if comm.world_size() > 1 {
            let beside = comm.beside();
            Way::Group { thread: Thread::start(comm)?, beside }
        } else {
            Way::Alone(VecDeque::new())
        };
        Ok(Self { way, waited: Duration::ZERO })
    }

    /// Sums `values` over all ranks.
    pub(super) fn statistics(&mut self, values: &mut Vec<f64>) -> Result<(), CommError> {
        let Way::Group { thread, beside } = &self.way else { return Ok(()) };
        let start = Instant::now();
        match beside {
            Some(group) => group.all_reduce_f64(values)?,
            None => {
                // A thread that is gone is noticed when its answer is waited for.
                drop(thread.requests.send(Request::Statistics(std::mem::take(values))));
                *values = thread.statistics.recv().map_err(|_| gone())??;
            }
        }
        self.waited += start.elapsed();
        Ok(())
    }

    /// Whether a bucket should wait for the next statistics to come back before it starts.
    pub(super) fn shares_one_queue(&self) -> bool {
        matches!(self.way, Way::Group { beside: None, .. })
    }

    /// Starts the sum of a gradient bucket over all ranks.
    pub(super) fn start_bucket(&mut self, values: Bucket) {
        match &mut self.way {
            Way::Alone(buckets) => buckets.push_back(values),
            Way::Group { thread, .. } => drop(thread.requests.send(Request::Bucket(values))),
        }
    }

    /// Waits for the oldest bucket.
    pub(super) fn finish_bucket(&mut self) -> Result<Bucket, CommError> {
        match &mut self.way {
            Way::Alone(buckets) => Ok(buckets.pop_front().unwrap_or_default()),
            Way::Group { thread, .. } => {
                let start = Instant::now();
                let answer = thread.buckets.recv().map_err(|_| gone())?;
                self.waited += start.elapsed();
                answer
            }
        }
    }

    /// Time waited since the last call.
    pub(super) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
}

impl Thread {
    fn start(comm: Arc<dyn Communicator>) -> std::io::Result<Self> {
        let (requests, incoming) = mpsc::channel();
        let (statistics_out, statistics) = mpsc::channel();
        let (buckets_out, buckets) = mpsc::channel();
        std::thread::Builder::new().name("all-reduce".into()).spawn(move || {
            // Ends when the engine drops its end.
            while let Ok(request) = incoming.recv() {
                let delivered = match request {
                    Request::Statistics(mut values) => {
                        let done = comm.all_reduce_f64(&mut values);
                        statistics_out.send(done.map(|()| values)).is_ok()
                    }
                    Request::Bucket(mut bucket) => {
                        let done = match &mut bucket {
                            Bucket::Single(values) => comm.all_reduce(values, Reduction::Sum),
                            Bucket::Exact(values) => comm.all_reduce_f64(values),
                        };
                        buckets_out.send(done.map(|()| bucket)).is_ok()
                    }
                };
                if !delivered {
                    return;
                }
            }
        })?;
        Ok(Self { requests, statistics, buckets })
    }
}

fn gone() -> CommError {
    CommError::Aborted { operation: "all_reduce", reason: "the communication thread has ended".into() }
}
