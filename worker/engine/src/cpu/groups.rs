//! The process groups of a plan: one for each set of axes over which values are summed or exchanged.

use crate::{net::Axes, plan::Mesh};
use lockstep_comm::{CommError, ProcessGroup, Values, ValuesMut};
use lockstep_protocol::agent::AxisTimes;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A group of some of the job's ranks. Errors name ranks of the job, not of the group.
#[derive(Clone)]
pub(super) struct Group {
    comm: Arc<dyn ProcessGroup>,
    ranks: Arc<[u32]>,
    /// Nanoseconds spent in calls since the last [`Group::take_waited`].
    waited_ns: Arc<AtomicU64>,
}

impl Group {
    /// The group of all of the job's ranks.
    pub(super) fn of_all_ranks(comm: Arc<dyn ProcessGroup>) -> Self {
        let ranks = (0..comm.size()).collect();
        Self { comm, ranks, waited_ns: Arc::default() }
    }

    /// This process's rank in the group.
    pub(super) fn rank(&self) -> u32 {
        self.comm.rank()
    }

    pub(super) fn size(&self) -> u32 {
        self.comm.size()
    }

    pub(super) fn all_reduce(&self, values: ValuesMut<'_>) -> Result<(), CommError> {
        self.call(|comm| comm.all_reduce(values))
    }

    pub(super) fn all_gather(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        self.call(|comm| comm.all_gather(input, output))
    }

    /// Sends `values`. Ranks without pictures in a micro-batch send no message.
    pub(super) fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError> {
        if values.is_empty() { Ok(()) } else { self.call(|comm| comm.send(values, to)) }
    }

    pub(super) fn recv(&self, values: ValuesMut<'_>, from: u32) -> Result<(), CommError> {
        if values.is_empty() { Ok(()) } else { self.call(|comm| comm.recv(values, from)) }
    }

    /// Time spent in this group's calls since the last call of this function.
    pub(super) fn take_waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.swap(0, Ordering::Relaxed))
    }

    /// Makes a call of the group, and counts its time.
    pub(super) fn call<T>(
        &self,
        call: impl FnOnce(&dyn ProcessGroup) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let began = Instant::now();
        let result = call(self.comm.as_ref());
        self.waited_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result.map_err(|error| error.in_parent(&self.ranks))
    }
}

/// Groups by the [`Axes`] that they span in addition to `data`.
#[derive(Clone)]
pub(super) struct ByAxes(Arc<[Group; 4]>);

impl ByAxes {
    /// The same group for all axes: in data parallelism ranks differ only in their pictures.
    pub(super) fn uniform(comm: Arc<dyn ProcessGroup>) -> Self {
        let group = Group::of_all_ranks(comm);
        Self(Arc::new(std::array::from_fn(|_| group.clone())))
    }

    pub(super) fn group(&self, axes: Axes) -> &Group {
        &self.0[index(axes)]
    }
}

fn index(axes: Axes) -> usize {
    usize::from(axes.model) + 2 * usize::from(axes.height)
}

/// A time for each set of axes over which values are summed in addition to `data`.
#[derive(Default)]
pub(super) struct TimesByAxes([(Axes, Duration); 4]);

impl TimesByAxes {
    pub(super) fn add(&mut self, axes: Axes, time: Duration) {
        let (entry_axes, sum) = &mut self.0[index(axes)];
        (*entry_axes, *sum) = (axes, *sum + time);
    }

    pub(super) fn sum(&self) -> Duration {
        self.0.iter().map(|(_, time)| *time).sum()
    }
}

/// All groups of a rank.
pub(super) struct Groups {
    mesh: Mesh,
    /// The ranks that share this rank's copy of the network.
    pub(super) model: Group,
    /// The ranks that share the rows of this rank's pictures.
    pub(super) height: Group,
    /// The ranks with the same coordinates in the other stages.
    pub(super) stage: Group,
    /// The groups that reduce gradients, concurrently with the backward pass and therefore separate from `statistics`.
    pub(super) gradients: ByAxes,
    /// The groups that sum batch statistics, for which the forward and backward passes wait.
    pub(super) statistics: ByAxes,
}

impl Groups {
    /// Seconds that this rank has spent in communication along each axis since the last call of this function:
    /// exchanges of activations, and the sums over pictures, whose times are `sums`.
    pub(super) fn take_waited(&self, sums: &TimesByAxes) -> AxisTimes {
        let [pipeline, height, model] =
            [&self.stage, &self.height, &self.model].map(|group| group.take_waited().as_secs_f64());
        let mut times = AxisTimes { pipeline, data: 0.0, height, model };
        for (axes, time) in &sums.0 {
            let axis = match self.mesh {
                Mesh { data: 2.., .. } => &mut times.data,
                Mesh { height: 2.., .. } if axes.height => &mut times.height,
                _ => &mut times.model,
            };
            *axis += time.as_secs_f64();
        }
        times
    }

    /// Collective over all ranks of the mesh: creates the groups.
    pub(super) fn split(mesh: Mesh, all: &dyn ProcessGroup) -> Result<Self, CommError> {
        // The group of the ranks with the same `color` (as in MPI_Comm_split).
        let split_by = |color: &dyn Fn(usize) -> usize| -> Result<Group, CommError> {
            let own = color(all.rank() as usize);
            let ranks = (0..all.size()).filter(|rank| color(*rank as usize) == own).collect();
            Ok(Group { comm: all.split(own as u32)?, ranks, waited_ns: Arc::default() })
        };
        let (model, height) = (|rank| mesh.model_rank(rank), |rank| mesh.height_rank(rank));
        let stage = |rank| mesh.stage_rank(rank);
        let by_axes = || -> Result<ByAxes, CommError> {
            let data =
                split_by(&|rank| (stage(rank) * mesh.height + height(rank)) * mesh.model + model(rank))?;
            let with_model = split_by(&|rank| stage(rank) * mesh.height + height(rank))?;
            // With a single rank on the axis `height`, groups with and without this axis are the same.
            Ok(ByAxes(Arc::new(match mesh.height {
                1 => [data.clone(), with_model.clone(), data, with_model],
                _ => [
                    data,
                    with_model,
                    split_by(&|rank| stage(rank) * mesh.model + model(rank))?,
                    split_by(&stage)?,
                ],
            })))
        };
        Ok(Self {
            mesh,
            model: split_by(&|rank| mesh.model_group(rank))?,
            height: split_by(&|rank| mesh.height_group(rank))?,
            stage: split_by(&|rank| rank % mesh.ranks_of_stage())?,
            gradients: by_axes()?,
            statistics: by_axes()?,
        })
    }
}
