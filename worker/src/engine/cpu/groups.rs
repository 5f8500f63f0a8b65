//! The groups of ranks of a plan: one for each set of axes that something is summed or exchanged over.

use crate::{
    comm::{CommError, ProcessGroup},
    engine::plan::Mesh,
    net::Axes,
};
use std::sync::Arc;

pub(super) type Group = Arc<dyn ProcessGroup>;

/// Groups by the [`Axes`] that they span in addition to `data`.
#[derive(Clone)]
pub(super) struct ByAxes([Group; 4]);

impl ByAxes {
    /// The same group for all axes: in data parallel all ranks differ in their pictures alone.
    pub(super) fn same(group: Group) -> Self {
        Self(std::array::from_fn(|_| group.clone()))
    }

    pub(super) fn of(&self, axes: Axes) -> &Group {
        &self.0[usize::from(axes.model) + 2 * usize::from(axes.height)]
    }
}

/// All groups that a rank is in.
pub(super) struct Groups {
    /// The ranks that share its copy of the network.
    pub(super) model: Group,
    /// The ranks that share the rows of its pictures.
    pub(super) height: Group,
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
        let (model, height) = (mesh.model_rank(rank), mesh.height_rank(rank));
        let by_axes = || -> Result<ByAxes, CommError> {
            let [data, with_model] = [of(height * mesh.model + model)?, of(height)?];
            // With one rank on the axis `height` these are the same groups.
            Ok(ByAxes(match mesh.height {
                1 => [data.clone(), with_model.clone(), data, with_model],
                _ => [data, with_model, of(model)?, of(0)?],
            }))
        };
        Ok(Self {
            model: of(rank / mesh.model)?,
            height: of(mesh.data_rank(rank) * mesh.model + model)?,
            gradients: by_axes()?,
            statistics: by_axes()?,
        })
    }
}
