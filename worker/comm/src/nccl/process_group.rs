//! NCCL as a [`ProcessGroup`]: values in host memory are copied to and from the GPU.

#![allow(unsafe_code)] // Raw device addresses; all device memory is allocated here and outlives its use.

use super::{Nccl, staging::Staging};
use crate::{
    CommError, Exchange, ProcessGroup, Reduction, SingleRank, Values, ValuesMut,
    ring::{Call, Operation, Part, Ring},
    values::check,
};
use cudarc::driver::{
    DriverError, result,
    sys::{self, CUresult, CUstream},
};
use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Ranks with one GPU each. Each call is first announced over the ring: unlike NCCL, the ring notices ranks that make
/// another call or have exited.
pub struct NcclProcessGroup {
    ring: Arc<Ring>,
    nccl: Arc<Nccl>,
    name: String,
    ordinal: i32,
    staging: Mutex<Staging>,
    splits: AtomicU64,
    /// The groups split from this group.
    split: Mutex<Vec<Weak<NcclProcessGroup>>>,
}

impl NcclProcessGroup {
    /// Collective: connects the GPUs of the ranks of `ring`. `name` must be unique within an attempt. `ordinal` is
    /// this rank's GPU, as CUDA numbers the devices visible to this process.
    ///
    /// # Errors
    /// As [`Nccl::connect`].
    pub fn connect(ring: Arc<Ring>, name: &str, ordinal: i32) -> Result<Arc<Self>, CommError> {
        let nccl = Nccl::connect(Exchange::Group(ring.as_ref()), name, ordinal, ring.timeout())?;
        let staging = Staging::new(ordinal).map_err(|e| device("NCCL start", e))?;
        Ok(Arc::new(Self {
            ring,
            nccl,
            name: name.into(),
            ordinal,
            staging: Mutex::new(staging),
            splits: AtomicU64::new(0),
            split: Mutex::default(),
        }))
    }

    /// The NCCL group of the same ranks, for calls on device memory.
    pub fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }

    /// Copies `input` to the GPU, enqueues a call with `launch(from, to, stream)`, waits for it, and copies its
    /// result at `to` into `output`. A failure ends the group.
    fn run(
        &self,
        operation: &'static str,
        input: &[u8],
        output: &mut [u8],
        launch: impl FnOnce(u64, u64, CUstream) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.run_staged(operation, input, output, launch).map_err(|error| {
            let error = self.ring.fail_with(error);
            self.nccl.abort(&error.to_string());
            error
        })
    }

    /// As [`Self::run`], for a call that replaces `values`. `launch(at, stream)` gets the address of the values on the
    /// GPU.
    fn run_in_place(
        &self,
        operation: &'static str,
        values: &mut ValuesMut<'_>,
        launch: impl FnOnce(u64, CUstream) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let input = values.as_values().bytes().to_vec();
        self.run(operation, &input, values.bytes_mut(), |from, at, stream| {
            // SAFETY: both allocations have room for the values, and `run` waits until `stream` has completed the
            // copy.
            unsafe { result::memcpy_dtod_async(at, from, input.len(), stream) }
                .map_err(|e| device(operation, e))?;
            launch(at, stream)
        })
    }

    fn run_staged(
        &self,
        operation: &'static str,
        input: &[u8],
        output: &mut [u8],
        launch: impl FnOnce(u64, u64, CUstream) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, to) = staging.copy_in(input, output.len()).map_err(|e| device(operation, e))?;
        launch(from, to, staging.stream)?;
        self.wait(operation, staging.stream)?;
        staging.copy_out(output).map_err(|e| device(operation, e))
    }

    /// Waits until the GPU has completed the work on `stream`.
    fn wait(&self, operation: &'static str, stream: CUstream) -> Result<(), CommError> {
        let query = || {
            // SAFETY: the stream lives as long as `self`.
            match unsafe { sys::cuStreamQuery(stream) } {
                CUresult::CUDA_SUCCESS => Ok(true),
                CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                error => Err(device(operation, DriverError(error))),
            }
        };
        wait_until_done(operation, query, || self.check(operation), self.timeout())
    }

    /// The header that precedes a message, because NCCL does not compare lengths and types.
    fn message(values: &Values<'_>) -> [u8; 16] {
        let words = Call::of(Operation::Message, values).packed();
        std::array::from_fn(|i| words[i / 8].to_le_bytes()[i % 8])
    }
}

impl ProcessGroup for Arc<NcclProcessGroup> {
    fn rank(&self) -> u32 {
        self.ring.rank()
    }

    fn size(&self) -> u32 {
        self.ring.size()
    }

    fn all_reduce(&self, mut values: ValuesMut<'_>, reduction: Reduction) -> Result<(), CommError> {
        check::reducible("all_reduce", values.data_type())?;
        let (dtype, count) = (values.data_type(), values.len());
        self.ring.announce(Call::of(Operation::AllReduce, &values.as_values()).reducing(reduction))?;
        if count == 0 {
            return Ok(());
        }
        self.run_in_place("all_reduce", &mut values, |at, stream| {
            // SAFETY: `count` values are at `at`, and `run_in_place` waits until `stream` has completed the call.
            unsafe { self.nccl.all_reduce(at, count, dtype, reduction, stream) }
        })
    }

    fn reduce_scatter(
        &self,
        input: Values<'_>,
        mut output: ValuesMut<'_>,
        reduction: Reduction,
    ) -> Result<(), CommError> {
        check::reducible("reduce_scatter", input.data_type())?;
        check::parts("reduce_scatter", (&input, self.size()), (&output, 1))?;
        self.ring.announce(Call::of(Operation::ReduceScatter, &input).reducing(reduction))?;
        let (dtype, count) = (output.data_type(), output.len());
        if count == 0 {
            return Ok(());
        }
        self.run("reduce_scatter", input.bytes(), output.bytes_mut(), |from, to, stream| {
            // SAFETY: as in `all_reduce`; the lengths match.
            unsafe { self.nccl.reduce_scatter(from, to, count, dtype, reduction, stream) }
        })
    }

    fn all_gather(&self, input: Values<'_>, mut output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_gather", (&input, 1), (&output, self.size()))?;
        self.ring.announce(Call::of(Operation::AllGather, &input))?;
        let (dtype, count) = (input.data_type(), input.len());
        if count == 0 {
            return Ok(());
        }
        self.run("all_gather", input.bytes(), output.bytes_mut(), |from, to, stream| {
            // SAFETY: as in `all_reduce`; the lengths match.
            unsafe { self.nccl.all_gather(from, to, count, dtype, stream) }
        })
    }

    fn all_to_all(&self, input: Values<'_>, mut output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_to_all", (&input, self.size()), (&output, self.size()))?;
        self.ring.announce(Call::of(Operation::AllToAll, &input))?;
        let (dtype, count) = (input.data_type(), input.len() / self.size() as usize);
        if count == 0 {
            return Ok(());
        }
        self.run("all_to_all", input.bytes(), output.bytes_mut(), |from, to, stream| {
            // SAFETY: as in `all_reduce`; the lengths match.
            unsafe { self.nccl.all_to_all(from, to, count, dtype, stream) }
        })
    }

    fn broadcast(&self, mut values: ValuesMut<'_>, root: u32) -> Result<(), CommError> {
        check::root("broadcast", root, self.size())?;
        self.ring.announce(Call::of(Operation::Broadcast, &values.as_values()).of_root(root))?;
        let (dtype, count) = (values.data_type(), values.len());
        if count == 0 {
            return Ok(());
        }
        self.run_in_place("broadcast", &mut values, |at, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { self.nccl.broadcast(at, count, dtype, root, stream) }
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.ring.barrier()
    }

    fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError> {
        self.ring.send((&NcclProcessGroup::message(&values)).into(), to)?;
        if values.is_empty() {
            return Ok(());
        }
        self.run("send", values.bytes(), &mut [], |from, _, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { self.nccl.send(from, values.len(), values.data_type(), to, stream) }
        })
    }

    fn recv(&self, mut values: ValuesMut<'_>, from: u32) -> Result<(), CommError> {
        let mut theirs = [0; 16];
        self.ring.recv((&mut theirs).into(), from)?;
        let wanted = NcclProcessGroup::message(&values.as_values());
        if theirs != wanted {
            let words = |bytes: [u8; 16]| {
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
                Call::describe([word(0), word(8)])
            };
            let detail = format!("is at {}; this rank is at {}", words(theirs), words(wanted));
            let error = self.ring.fail_with(CommError::Mismatch { operation: "recv", peer: from, detail });
            self.nccl.abort(&error.to_string());
            return Err(error);
        }
        if values.is_empty() {
            return Ok(());
        }
        let (dtype, count) = (values.data_type(), values.len());
        self.run("recv", &[], values.bytes_mut(), |_, to, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { self.nccl.recv(to, count, dtype, from, stream) }
        })
    }

    /// Each new group has its own communicator, so an error of one group does not end the other.
    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}/split {number} color {}", self.name, color.unwrap_or_default());
        let group = self.ring.split_with(color, key, |part| match part {
            Part::Single => Ok(None),
            Part::Ring(ring) => NcclProcessGroup::connect(ring, &name, self.ordinal).map(Some),
        })?;
        Ok(match group {
            None => None,
            Some(None) => Some(Arc::new(SingleRank)),
            Some(Some(group)) => {
                self.split.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&group));
                Some(Arc::new(group))
            }
        })
    }

    fn abort(&self, reason: &str) {
        self.ring.abort(reason);
        self.nccl.abort(reason);
        let split = std::mem::take(&mut *self.split.lock().unwrap_or_else(PoisonError::into_inner));
        split.iter().filter_map(Weak::upgrade).for_each(|group| group.abort(reason));
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        NcclProcessGroup::check(self, operation)
    }

    fn timeout(&self) -> Duration {
        NcclProcessGroup::timeout(self)
    }
}

impl NcclProcessGroup {
    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.ring.check_neighbours(operation)?;
        self.nccl.async_error()
    }

    fn timeout(&self) -> Duration {
        self.ring.timeout()
    }
}

/// Polls `query` until the operation has completed.
///
/// `check` fails as soon as a rank has exited. A rank may complete an operation and exit before this rank has seen
/// its own part complete. So after `check` has failed, `query` is asked once more, and the failure counts only if the
/// operation is still incomplete.
///
/// # Errors
/// The error of `query` or `check`, or [`CommError::Failed`] after `timeout`.
fn wait_until_done(
    operation: &'static str,
    query: impl Fn() -> Result<bool, CommError>,
    check: impl Fn() -> Result<(), CommError>,
    timeout: Duration,
) -> Result<(), CommError> {
    let began = Instant::now();
    while !query()? {
        if let Err(error) = check() {
            return if query()? { Ok(()) } else { Err(error) };
        }
        if began.elapsed() > timeout {
            let detail = format!("the GPUs are not done after {:.0} s", timeout.as_secs_f64());
            return Err(CommError::Failed { operation, detail });
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn device(operation: &'static str, error: DriverError) -> CommError {
    CommError::Failed { operation, detail: format!("the GPU: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Waits for an operation that completes at the `after`th query, while a neighbour has exited.
    fn wait_for(after: u32) -> Result<(), CommError> {
        let queries = Cell::new(0);
        let query = || {
            queries.set(queries.get() + 1);
            Ok(queries.get() >= after)
        };
        let check_neighbours =
            || Err(CommError::Disconnected { operation: "all_reduce", peer: 1, detail: String::new() });
        wait_until_done("all_reduce", query, check_neighbours, Duration::from_secs(60))
    }

    #[test]
    fn an_operation_completed_before_a_neighbour_exits_succeeds() {
        wait_for(1).unwrap();
        wait_for(2).unwrap();
        assert!(matches!(wait_for(3), Err(CommError::Disconnected { peer: 1, .. })));
    }

    #[test]
    fn an_operation_that_never_completes_fails_after_the_timeout() {
        let error = wait_until_done("all_reduce", || Ok(false), || Ok(()), Duration::ZERO).unwrap_err();
        assert!(matches!(error, CommError::Failed { .. }), "{error}");
    }
}
