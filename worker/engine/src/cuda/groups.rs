//! The process groups of a plan in which ranks share copies of the network or rows of pictures, or compute stages. The groups connect the
//! ranks' host processes, not their GPUs.

use crate::{EngineError, plan::Mesh};
use lockstep_comm::ProcessGroup;
use std::sync::Arc;

/// The groups of [`Group`](super::command::Group) with these names.
pub(super) struct Groups {
    pub(super) model: Arc<dyn ProcessGroup>,
    pub(super) height: Arc<dyn ProcessGroup>,
    pub(super) data: Arc<dyn ProcessGroup>,
    pub(super) stage: Arc<dyn ProcessGroup>,
}

impl Groups {
    /// Collective over all ranks of the mesh: creates the groups. `None` if every rank has the whole network and whole pictures.
    pub(super) fn split(mesh: Mesh, all: &dyn ProcessGroup) -> Result<Option<Self>, EngineError> {
        if mesh.stage * mesh.height * mesh.model == 1 {
            return Ok(None);
        }
        let rank = all.rank() as usize;
        let split = |color: usize| all.split(color as u32);
        let same_part = mesh.stage_rank(rank) * mesh.model + mesh.model_rank(rank);
        let [model, height, data, stage] =
            [mesh.model_group(rank), mesh.height_group(rank), same_part, rank % mesh.ranks_of_stage()]
                .map(split);
        Ok(Some(Self { model: model?, height: height?, data: data?, stage: stage? }))
    }
}
