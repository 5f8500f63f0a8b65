//! A process group of one rank.

use super::{CommError, ProcessGroup, Values, ValuesMut, values::check};
use std::{sync::Arc, time::Duration};

/// A group of one rank: the result of each collective is this rank's own input. Calls fail only for invalid
/// arguments, which are rejected as in every group.
#[derive(Debug, Default)]
pub struct SingleRank;

fn copy(operation: &'static str, input: Values<'_>, mut output: ValuesMut<'_>) -> Result<(), CommError> {
    check::parts(operation, (&input, 1), (&output, 1))?;
    output.bytes_mut().copy_from_slice(input.bytes());
    Ok(())
}

impl ProcessGroup for SingleRank {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn all_reduce(&self, values: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("all_reduce", values.data_type())
    }

    fn reduce_scatter(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("reduce_scatter", input.data_type())?;
        copy("reduce_scatter", input, output)
    }

    fn all_gather(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        copy("all_gather", input, output)
    }

    fn all_to_all(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        copy("all_to_all", input, output)
    }

    fn broadcast(&self, _: ValuesMut<'_>) -> Result<(), CommError> {
        Ok(())
    }

    fn barrier(&self) -> Result<(), CommError> {
        Ok(())
    }

    fn send(&self, _: Values<'_>, to: u32) -> Result<(), CommError> {
        check::peer("send", to, 0, 1)
    }

    fn recv(&self, _: ValuesMut<'_>, from: u32) -> Result<(), CommError> {
        check::peer("recv", from, 0, 1)
    }

    fn split(&self, _: u32) -> Result<Arc<dyn ProcessGroup>, CommError> {
        Ok(Arc::new(SingleRank))
    }

    fn abort(&self, _: &str) {}

    fn timeout(&self) -> Duration {
        Duration::MAX
    }
}
