//! The ring as a [`ProcessGroup`].

use super::{Call, Operation, Ring};
use crate::{CommError, ProcessGroup, SharedMemoryOrReason, Values, ValuesMut, values::check};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{sync::Arc, time::Duration};

impl ProcessGroup for Ring {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_reduce(&self, values: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("all_reduce", values.data_type())?;
        let call = Call::of(Operation::AllReduce, &values.as_values());
        self.call(call, |active| match values {
            ValuesMut::F32(values) => active.all_reduce(values),
            ValuesMut::F64(values) => active.all_reduce(values),
            // Rejected by `check::reducible`.
            ValuesMut::U8(_) => Ok(()),
        })
    }

    fn reduce_scatter(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("reduce_scatter", input.data_type())?;
        check::parts("reduce_scatter", (&input, self.size), (&output, 1))?;
        self.call(Call::of(Operation::ReduceScatter, &input), |active| match (input, output) {
            (Values::F32(from), ValuesMut::F32(to)) => active.reduce_scatter(from, to),
            (Values::F64(from), ValuesMut::F64(to)) => active.reduce_scatter(from, to),
            // Rejected by the checks above.
            _ => Ok(()),
        })
    }

    fn all_gather(&self, input: Values<'_>, mut output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_gather", (&input, 1), (&output, self.size))?;
        self.call(Call::of(Operation::AllGather, &input), |active| {
            let (own, slots) = (input.bytes(), output.bytes_mut());
            let at = active.ring.rank as usize * own.len();
            slots[at..at + own.len()].copy_from_slice(own);
            active.gather(slots)
        })
    }

    fn all_to_all(&self, input: Values<'_>, mut output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_to_all", (&input, self.size), (&output, self.size))?;
        let call = Call::of(Operation::AllToAll, &input);
        self.call(call, |active| active.all_to_all(input.bytes(), output.bytes_mut()))
    }

    fn broadcast(&self, mut values: ValuesMut<'_>) -> Result<(), CommError> {
        let call = Call::of(Operation::Broadcast, &values.as_values());
        self.call(call, |active| active.broadcast(values.bytes_mut()))
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.announce(Call::empty(Operation::Barrier))
    }

    fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError> {
        check::peer("send", to, self.rank, self.size)?;
        self.mesh.send(values, to)
    }

    fn recv(&self, values: ValuesMut<'_>, from: u32) -> Result<(), CommError> {
        check::peer("recv", from, self.rank, self.size)?;
        self.mesh.recv(values, from, || self.check("recv"))
    }

    fn split(&self, color: u32) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.split_with(color, |ring| Ok(ring as Arc<dyn ProcessGroup>))
    }

    fn abort(&self, reason: &str) {
        self.end.abort(reason);
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.end.check_not_ended(operation)?;
        // A call in progress notices a closed connection itself.
        let Ok(sockets) = self.sockets.try_lock() else { return Ok(()) };
        for (stream, peer) in [(&sockets.next, self.next_rank()), (&sockets.previous, self.previous_rank())] {
            let mut ready = [PollFd::new(stream, PollFlags::RDHUP)];
            let polled = poll(&mut ready, Some(&Timespec::default()));
            let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
            if polled.is_ok() && ready[0].revents().intersects(gone) {
                return Err(CommError::Disconnected { operation, peer, detail: None });
            }
        }
        Ok(())
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn concurrent_group(&self) -> Option<Arc<dyn ProcessGroup>> {
        self.concurrent.clone().map(|ring| ring as Arc<dyn ProcessGroup>)
    }

    fn shared_memory(&self, _: usize) -> Result<SharedMemoryOrReason, CommError> {
        let reason = self.shm_unavailable_reason.get();
        Ok(Err(reason.map_or("the ranks are not known to be on one machine", String::as_str).into()))
    }
}
