//! All-reduces of a step. Ranks that share memory need no all-reduce of gradients ([`super::state`]) and sum statistics in that
//! memory. Other ranks all-reduce gradients on a thread, concurrently with the backward pass. If ranks divide the optimizer's
//! state ([`crate::sharding`]), gradients are reduce-scattered: a rank gets only the sum of its own part of each bucket.
//!
//! Every rank must call the same collectives of a group in the same order. Gradient buckets use one group, in the order in which
//! the backward pass completes them. Statistics of batch norms, for which a pass waits, use a second group of the same ranks
//! ([`ProcessGroup::concurrent_group`]).
//!
//! Ranks that share a network have one group for each set of axes. The thread's single queue keeps the buckets of all groups in the
//! same order on every rank, so no two ranks wait for each other in different groups.

use super::groups::{ByAxes, Group, Groups, TimesByAxes};
use crate::net::Axes;
use lockstep_comm::{
    CommError, ProcessGroup, Values, ValuesMut,
    shm::{SharedMemory, SharedSlice},
};
use std::{
    io,
    sync::{Arc, mpsc},
    time::Instant,
};

/// Gradients of some parameters, before or after their sum over the ranks.
#[derive(Debug)]
pub(super) enum Bucket {
    F32(SharedSlice<f32>),
    /// See [`super::gradient`].
    F64(SharedSlice<f64>),
}

impl Default for Bucket {
    fn default() -> Self {
        Bucket::F32(SharedSlice::default())
    }
}

/// How the ranks sum values.
enum Transport {
    /// A single rank: there is nothing to sum.
    SingleRank,
    /// Memory that all ranks map.
    Shared(SharedMemory),
    /// A thread all-reduces buckets.
    Group { thread: Thread, gradients: ByAxes, statistics: ByAxes },
}

/// The communication thread. It reduces buckets in the order of the requests.
struct Thread {
    requests: mpsc::Sender<(Group, Bucket)>,
    buckets: mpsc::Receiver<Result<Bucket, CommError>>,
}

/// Sums values over the ranks and measures this rank's waiting time.
pub(super) struct Reducer {
    transport: Transport,
    /// Waiting time in the current step.
    pub(super) waited: TimesByAxes,
}

impl Reducer {
    /// `groups`: the groups of ranks that share copies of the network, if there are any. `memory`: shared memory that holds all
    /// ranks' gradients, if there is one. `is_sharded`: a rank needs only its own part of a bucket.
    pub(super) fn new(
        comm: &Arc<dyn ProcessGroup>,
        groups: Option<&Groups>,
        memory: Option<&SharedMemory>,
        is_sharded: bool,
    ) -> io::Result<Self> {
        let over = |gradients, statistics| -> io::Result<Transport> {
            Ok(Transport::Group { thread: Thread::start(is_sharded)?, gradients, statistics })
        };
        let transport = match (groups, memory) {
            (Some(groups), _) => over(groups.gradients.clone(), groups.statistics.clone())?,
            _ if comm.size() == 1 => Transport::SingleRank,
            (None, Some(memory)) => Transport::Shared(memory.clone()),
            (None, None) => {
                let concurrent = comm.concurrent_group().ok_or_else(|| {
                    io::Error::other("the ranks have no concurrent group; this is a bug in Lockstep")
                })?;
                over(ByAxes::uniform(comm.clone()), ByAxes::uniform(concurrent))?
            }
        };
        Ok(Self { transport, waited: TimesByAxes::default() })
    }

    /// Sums `values` over all ranks along `data` and `axes`. While this rank waits in shared memory, it calls `idle`, which does some
    /// other work. `idle` returns false if there is no other work.
    pub(super) fn sum_statistics(
        &mut self,
        values: &mut [f64],
        axes: Axes,
        idle: &mut dyn FnMut() -> bool,
    ) -> Result<(), CommError> {
        let waited = match &self.transport {
            Transport::SingleRank => return Ok(()),
            Transport::Shared(memory) => memory.all_reduce_f64(values, idle)?,
            Transport::Group { statistics, .. } => {
                let start = Instant::now();
                statistics.group(axes).all_reduce(values.into())?;
                start.elapsed()
            }
        };
        self.waited.add(axes, waited);
        Ok(())
    }

    /// Whether this reducer sums gradients.
    pub(super) fn reduces_gradients(&self) -> bool {
        matches!(self.transport, Transport::Group { .. })
    }

    /// Starts the sum of a gradient bucket over all ranks along `data` and `axes`.
    pub(super) fn start_bucket(&mut self, values: Bucket, axes: Axes) {
        if let Transport::Group { thread, gradients, .. } = &self.transport {
            // If the thread has ended, the wait for its result fails.
            drop(thread.requests.send((gradients.group(axes).clone(), values)));
        }
    }

    /// Waits for the oldest started bucket, which is summed over all ranks along `data` and `axes`, and returns its sum.
    pub(super) fn finish_bucket(&mut self, axes: Axes) -> Result<Bucket, CommError> {
        let Transport::Group { thread, .. } = &self.transport else { return Err(thread_ended()) };
        let start = Instant::now();
        let answer = thread.buckets.recv().map_err(|_| thread_ended())?;
        self.waited.add(axes, start.elapsed());
        answer
    }
}

impl Thread {
    fn start(is_sharded: bool) -> io::Result<Self> {
        let (requests, incoming) = mpsc::channel::<(Group, Bucket)>();
        let (outgoing, buckets) = mpsc::channel();
        std::thread::Builder::new().name("all-reduce".into()).spawn(move || {
            // Ends when the engine drops the sender.
            for (group, mut bucket) in incoming {
                let done = match &mut bucket {
                    Bucket::F32(values) => sum(&group, values, is_sharded),
                    Bucket::F64(values) => sum(&group, values, is_sharded),
                };
                if outgoing.send(done.map(|()| bucket)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { requests, buckets })
    }
}

/// Sums values over the ranks. If `is_sharded`, the values have one part per rank, and only this rank's part is summed.
fn sum<T>(group: &Group, values: &mut [T], is_sharded: bool) -> Result<(), CommError>
where
    T: Copy + Default,
    for<'a> Values<'a>: From<&'a [T]>,
    for<'a> ValuesMut<'a>: From<&'a mut [T]>,
{
    if !is_sharded {
        return group.all_reduce(values.into());
    }
    let len = values.len() / group.size() as usize;
    let mut part = vec![T::default(); len];
    group.call(|comm| comm.reduce_scatter((&*values).into(), (&mut part[..]).into()))?;
    values[group.rank() as usize * len..][..len].copy_from_slice(&part);
    Ok(())
}

fn thread_ended() -> CommError {
    CommError::Aborted { operation: "all_reduce", reason: "the communication thread has ended".into() }
}
