//! The groups of ranks of a plan: one for each set of axes that something is summed or exchanged over.

use crate::{net::Axes, plan::Mesh};
use lockstep_comm::{CommError, ProcessGroup};
use std::sync::Arc;

pub(super) type Group = Arc<dyn ProcessGroup>;

/// Groups by the [`Axes`] that they span in addition to `data`.
#[derive(Clone)]
pub(super) struct ByAxes([Group; 2]);

impl ByAxes {
    /// The same group for all axes: in data parallel all ranks differ in their pictures alone.
    pub(super) fn same(group: Group) -> Self {
        Self([group.clone(), group])
    }

    pub(super) fn of(&self, axes: Axes) -> &Group {
        &self.0[usize::from(axes.model)]
    }
}

/// All groups that a rank is in.
pub(super) struct Groups {
    /// The ranks that share its copy of the network.
    pub(super) model: Group,
    /// For gradients. Their sums run beside the backward pass, in an order of their own.
    pub(super) gradients: ByAxes,
    /// For statistics, which the pass waits for.
    pub(super) statistics: ByAxes,
}

impl Groups {
    /// Collective over all ranks of the mesh.
    ///
    /// # Errors
    /// Ranks cannot connect.
    pub(super) fn split(mesh: Mesh, all: &dyn ProcessGroup) -> Result<Self, CommError> {
        let rank = all.rank() as usize;
        let of = |color: usize| -> Result<Group, CommError> {
            let group = all.split(Some(color as u32), all.rank() as i32)?;
            group.ok_or_else(|| CommError::Failed { operation: "split", detail: "there is no group".into() })
        };
        let by_axes = || Ok::<_, CommError>(ByAxes([of(mesh.model_rank(rank))?, of(0)?]));
        Ok(Self { model: of(rank / mesh.model)?, gradients: by_axes()?, statistics: by_axes()? })
    }
}
