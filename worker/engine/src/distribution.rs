//! How the tensors of a network are distributed over the ranks of a plan. A checkpoint has whole tensors; an engine has the
//! parts of its rank. For a checkpoint, the parts of a tensor are sent only to the rank that writes the tensor, and only that rank
//! has memory for the whole tensor.

use super::{
    Engine, EngineError, HostTensor, NamedTensors, Optimizer, OptimizerState, StateDict, Writers,
    net::{Network, Slice},
    optimizer::state_shapes,
    plan::{self, Mesh, Plan},
};
use lockstep_comm::{CommError, ProcessGroup};
use lockstep_host::tensors::fit::Shapes;
use std::collections::HashMap;

/// Maximum number of values of a message. Tests have a small maximum, so that a tensor needs several messages.
const PIECE: usize = if cfg!(test) { 1000 } else { 4 << 20 };

/// The parts of a network that the ranks of `comm` have.
pub struct Distribution<'a> {
    comm: &'a dyn ProcessGroup,
    network: &'a Network,
    mesh: Mesh,
    /// By stage, then by rank of the model group: the rank's parameters. `None` if the rank has the whole parameter.
    parameters: Vec<HashMap<String, Option<Slice>>>,
}

impl<'a> Distribution<'a> {
    /// The parts of `network` under `plan`.
    ///
    /// # Errors
    /// `plan` cannot split the network.
    pub fn new(network: &'a Network, plan: &Plan, comm: &'a dyn ProcessGroup) -> Result<Self, EngineError> {
        let mesh = plan.mesh;
        let of_rank = |rank: usize| -> Result<HashMap<_, _>, EngineError> {
            let parameters = if plan.is_data() {
                network.parameters()
            } else {
                plan::lower(network, plan, rank).map_err(EngineError::Parameters)?.parameters()
            };
            Ok(parameters.into_iter().map(|p| (p.name, p.slice)).collect())
        };
        let of_stage = |stage: usize| (0..mesh.model).map(move |rank| stage * mesh.ranks_of_stage() + rank);
        let parameters =
            (0..mesh.stage).flat_map(of_stage).map(of_rank).collect::<Result<_, EngineError>>()?;
        Ok(Self { comm, network, mesh, parameters })
    }

    /// Shapes of the whole parameters and running statistics.
    pub fn shapes(&self) -> Shapes {
        self.network.parameters().into_iter().map(|p| (p.name, p.shape)).collect()
    }

    /// Shapes of the whole optimizer slots.
    pub fn slot_shapes(&self, optimizer: &Optimizer) -> Shapes {
        state_shapes(optimizer, self.network).into_iter().collect()
    }

    /// Collective: distributes rank 0's tensors `whole`, which have the `shapes`. Each rank gets its parts.
    ///
    /// # Errors
    /// Another rank is gone.
    pub fn scatter(
        &self,
        mut whole: Option<NamedTensors>,
        shapes: Shapes,
    ) -> Result<NamedTensors, CommError> {
        let own_rank = self.comm.rank();
        let mut tensors = NamedTensors::new();
        for (name, shape) in shapes {
            let source = whole.as_mut().and_then(|whole| whole.remove(&name)).map(|tensor| tensor.values);
            let parts = self.parts(0..self.comm.size(), &name, &shape);
            let part = parts.iter().find(|(rank, _)| *rank == own_rank).map(|(_, part)| part);
            let mut values;
            if parts.iter().all(|(_, part)| part.is_all()) {
                values = source.unwrap_or_else(|| vec![0.0; shape.iter().product()]);
                self.comm.broadcast((&mut values).into())?;
            } else if let (0, Some(source)) = (own_rank, source) {
                let read = |part: &Slice, from: usize, to: &mut [f32]| {
                    part.read(from, to, |at, to| to.copy_from_slice(&source[at..at + to.len()]));
                };
                for_each_piece(&parts, |rank, part, from, piece| {
                    if rank == 0 {
                        return Ok(());
                    }
                    read(part, from, piece);
                    self.comm.send((&*piece).into(), rank)
                })?;
                values = vec![0.0; part.map_or(0, Slice::len)];
                if let Some(part) = part {
                    read(part, 0, &mut values);
                }
            } else {
                values = vec![0.0; part.map_or(0, Slice::len)];
                for piece in values.chunks_mut(PIECE) {
                    self.comm.recv(piece.into(), 0)?;
                }
            }
            if let Some(part) = part {
                tensors.insert(name, HostTensor { shape: part.shape(), values });
            }
        }
        Ok(tensors)
    }

    /// See [`Engine::state_dict`], for this rank's `engine`. `slots(true)` returns the engine's optimizer
    /// state, and `slots(false)` returns `None`. Where ranks divide the state, `slots` is collective.
    pub(super) fn state_dict(
        &self,
        engine: &dyn Engine,
        writers: &Writers,
        optimizer: &Optimizer,
        slots: impl FnOnce(bool) -> Result<Option<OptimizerState>, EngineError>,
    ) -> Result<Option<StateDict>, EngineError> {
        let has_writer = self.ranks_of_copy().any(|rank| writers.contains(rank));
        // Gathers one kind of tensors after another, so that few copies are in memory at a time.
        let mut state = StateDict::default();
        if has_writer {
            state.parameters = self.gather(engine.parameters()?, self.shapes(), |name| writers.of(name))?;
        }
        if let Some(mut local) = slots(has_writer)? {
            local.slots = self.gather(local.slots, self.slot_shapes(optimizer), |name| writers.of(name))?;
            state.optimizer = Some(local);
            if let Some(average) = engine.averaged()? {
                let whole = self.gather(average, self.shapes(), |name| writers.of_average(name))?;
                state.average = Some(whole);
            }
            state.loss_scaling = engine.loss_scaling()?;
        }
        if self.mesh.stage * self.mesh.model > 1 {
            // A rank that left the group now would end the transfers of other ranks.
            self.comm.barrier()?;
        }
        Ok(writers.contains(self.comm.rank()).then_some(state))
    }

    /// Collective among the ranks of a copy of the network: sends the parts `own` of tensors to the ranks of this copy that write
    /// the tensors. Returns the whole tensors that this rank writes. `shapes` has the shapes of all whole tensors.
    fn gather(
        &self,
        mut own: NamedTensors,
        shapes: Shapes,
        writer_of: impl Fn(&str) -> u32,
    ) -> Result<NamedTensors, CommError> {
        let rank = self.comm.rank();
        let mut whole = NamedTensors::new();
        for (name, shape) in shapes {
            let (writer, own_part) = (writer_of(&name), own.remove(&name));
            if self.ranks_of_copy().all(|of_copy| of_copy != writer) {
                continue;
            }
            let mut parts = self.parts(self.ranks_of_copy(), &name, &shape);
            if parts.iter().all(|(_, part)| part.is_all()) {
                // One rank with the tensor suffices. The writer is chosen if it has the tensor.
                let index = parts.iter().position(|(rank, _)| *rank == writer).unwrap_or(0);
                parts = parts.into_iter().skip(index).take(1).collect();
            }
            let is_sender = parts.iter().any(|(from, _)| *from == rank);
            match own_part {
                Some(tensor) if rank == writer && parts.len() == 1 && is_sender => {
                    whole.insert(name, tensor);
                }
                own_part if rank == writer => {
                    let mut values = vec![0.0; shape.iter().product()];
                    for_each_piece(&parts, |from, part, offset, piece| {
                        match &own_part {
                            Some(tensor) if from == rank => {
                                piece.copy_from_slice(&tensor.values[offset..offset + piece.len()]);
                            }
                            _ => self.comm.recv((&mut *piece).into(), from)?,
                        }
                        part.write(offset, piece, &mut values);
                        Ok(())
                    })?;
                    whole.insert(name, HostTensor { shape, values });
                }
                Some(tensor) if is_sender => {
                    for piece in tensor.values.chunks(PIECE) {
                        self.comm.send(piece.into(), writer)?;
                    }
                }
                _ => {}
            }
        }
        Ok(whole)
    }

    /// The ranks of this rank's copy of the network: the ranks of all stages with the same coordinates on the axes `data` and `height`.
    fn ranks_of_copy(&self) -> impl Iterator<Item = u32> {
        let of_stage = self.mesh.ranks_of_stage() as u32;
        let model = self.mesh.model as u32;
        let first = self.comm.rank() % of_stage / model * model;
        (0..self.mesh.stage as u32)
            .flat_map(move |stage| (0..model).map(move |rank| stage * of_stage + first + rank))
    }

    /// The parts that `ranks` have of a tensor (a parameter or an optimizer slot). Ranks of other stages have none.
    fn parts(&self, ranks: impl IntoIterator<Item = u32>, name: &str, shape: &[usize]) -> Vec<(u32, Slice)> {
        let of_rank = |rank: u32| {
            let (stage, model) = (self.mesh.stage_rank(rank as usize), self.mesh.model_rank(rank as usize));
            let parameters = &self.parameters[stage * self.mesh.model + model];
            let parameter = || parameters.get(name.rsplit_once('.')?.0);
            let part = parameters.get(name).or_else(parameter)?.clone();
            Some((rank, part.unwrap_or_else(|| Slice::all(shape))))
        };
        ranks.into_iter().filter_map(of_rank).collect()
    }
}

/// Calls `each` for each piece of each part of a tensor. The arguments are the part's rank, the part, the index of the piece's
/// first value in the part, and memory for the piece. The ranks take turns, so that no rank waits for all pieces of another rank.
fn for_each_piece(
    parts: &[(u32, Slice)],
    mut each: impl FnMut(u32, &Slice, usize, &mut [f32]) -> Result<(), CommError>,
) -> Result<(), CommError> {
    let longest = parts.iter().map(|(_, part)| part.len()).max().unwrap_or(0);
    let mut memory = vec![0.0; longest.min(PIECE)];
    for from in (0..longest).step_by(PIECE) {
        for (rank, part) in parts.iter().filter(|(_, part)| from < part.len()) {
            let count = PIECE.min(part.len() - from);
            each(*rank, part, from, &mut memory[..count])?;
        }
    }
    Ok(())
}

/// Collective: copies the parameters of the first rank to all ranks of a stage. `tensors` are the tensors of `part`, a rank's part
/// of the network. `among_same_part` broadcasts values among the ranks with the same part, `among_model_group` in the model group.
pub(super) fn broadcast(
    part: &Network,
    tensors: &mut NamedTensors,
    among_same_part: impl Fn(&mut [f32]) -> Result<(), CommError>,
    among_model_group: impl Fn(&mut [f32]) -> Result<(), CommError>,
) -> Result<(), CommError> {
    for parameter in part.parameters() {
        if let Some(tensor) = tensors.get_mut(&parameter.name) {
            among_same_part(&mut tensor.values)?;
            if parameter.slice.is_none() {
                among_model_group(&mut tensor.values)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        AverageOn,
        net::{init, resnet},
    };
    use lockstep_comm::rendezvous::loopback::on_connected_ranks;
    use lockstep_protocol::spec::{Arch, ShardSpec, Split};
    use std::time::Duration;

    /// Stages, copies of the network, and tensors split over outputs (unevenly) and inputs; one writer and several.
    #[test]
    fn tensors_that_are_scattered_are_gathered_whole_by_their_writers() {
        let network = resnet::of(Arch::ResNet20, 32, 101);
        let mut initial = init::initial_parameters(&network, false, 1);
        initial.get_mut("fc.bias").unwrap().values[100] = -0.0;
        let split = |pattern: &str, split| ShardSpec { pattern: pattern.into(), split };
        let strategies = vec![split("layer3.*.conv2", Split::In), split("fc", Split::Out)];
        for (stage, data, model, writing) in
            [(1, 1, 3, &[0][..]), (1, 2, 2, &[0, 1, 2, 3]), (2, 1, 2, &[0]), (2, 1, 2, &[0, 1, 2, 3])]
        {
            let plan = Plan::on(Mesh { stage, data, height: 1, model }, strategies.clone());
            let writers = Writers::divide(&network, &[], AverageOn::NoRank, writing);
            let (ranks, timeout) = (plan.mesh.ranks() as u32, Duration::from_secs(60));
            let of_ranks = on_connected_ranks(ranks, timeout, |_, ring| {
                let rank = ring.rank();
                let distribution = Distribution::new(&network, &plan, ring.as_ref()).unwrap();
                let given = (rank == 0).then(|| initial.clone());
                let own = distribution.scatter(given, distribution.shapes()).unwrap();
                let shape = own.get("fc.weight").map(|tensor| tensor.shape.clone());
                let whole = distribution.gather(own, distribution.shapes(), |name| writers.of(name));
                let whole = whole.unwrap();
                assert!(whole.keys().all(|name| writers.of(name) == rank));
                ring.barrier().unwrap();
                (shape, whole)
            });
            let rows: usize = of_ranks.iter().flat_map(|(shape, _)| shape).map(|shape| shape[0]).sum();
            assert_eq!(rows, data * 101, "{plan}: each copy is there once");
            let gathered: NamedTensors = of_ranks.into_iter().flat_map(|(_, whole)| whole).collect();
            let bits = |tensors: &NamedTensors| -> Vec<u32> {
                tensors.values().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect()
            };
            assert!(gathered == initial && bits(&gathered) == bits(&initial), "{plan}");
        }
    }
}
