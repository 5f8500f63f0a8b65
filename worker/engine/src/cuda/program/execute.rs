//! Launches commands: converts operands to addresses, and streams and events to the driver's handles.

use super::*;
use crate::cuda::command::Arg;

impl Program {
    /// Launches the commands in order. `pictures` is the address of [`Region::Pictures`].
    pub(in crate::cuda) fn start(&self, commands: &[Command], pictures: Ptr) -> Result<(), EngineError> {
        commands.iter().try_for_each(|command| self.start_one(command, pictures))
    }

    fn start_one(&self, command: &Command, pictures: Ptr) -> Result<(), EngineError> {
        let address = |operand: Operand| self.address(operand, pictures);
        match command {
            Command::Part(part) => self.kernels.profile.begin_part(*part),
            Command::Alloc { .. } | Command::Free { .. } => {}
            Command::Kernel { stream, kernel } => self.launch_on(*stream, kernel, pictures)?,
            Command::Convolution { stream, convolution, tensors, workspace } => {
                let plan = self.tuner.plan(convolution)?;
                let Tensors { x, w, y, channel_sums } = *tensors;
                let tensors = Tensors {
                    x: address(x)?,
                    w: address(w)?,
                    y: address(y)?,
                    channel_sums: address(channel_sums)?,
                };
                let (stream, workspace) = (self.stream(*stream)?, address(*workspace)?);
                let run = || self.tuner.cudnn.run(stream, plan, tensors, workspace);
                self.kernels.profile.time(stream, run)?;
            }
            Command::Record { stream, event } => self.event(*event)?.record(self.stream(*stream)?)?,
            Command::Wait { stream, event } => self.stream(*stream)?.wait(self.event(*event)?)?,
            Command::Collective { stream, kind, group, from, to, count, dtype } => {
                let reducer = self.reducer.as_ref().ok_or_else(|| absent("a group of ranks"))?;
                let from_and_to = [address(*from)?, address(*to)?];
                reducer.collective(self.stream(*stream)?, (*kind, *group), from_and_to, *count, *dtype)?;
            }
            Command::Exchange { stream, group, sends, receives, dtype } => {
                let reducer = self.reducer.as_ref().ok_or_else(|| absent("a group of ranks"))?;
                let messages = |pieces: &[(u32, Operand)]| -> Result<Vec<_>, CudaError> {
                    let message = |(rank, piece): &(u32, Operand)| {
                        Ok((*rank, address(*piece)?, piece.bytes / dtype.size()))
                    };
                    pieces.iter().map(message).collect()
                };
                let [sends, receives] = [messages(sends)?, messages(receives)?];
                reducer.send_and_receive(self.stream(*stream)?, *group, [&sends, &receives], *dtype)?;
            }
        }
        Ok(())
    }

    /// Launches kernels that belong to no step, on the main stream.
    pub(in crate::cuda) fn launch(&self, kernels: impl IntoIterator<Item = Kernel>) -> Result<(), CudaError> {
        kernels.into_iter().try_for_each(|kernel| self.launch_on(StreamId::Main, &kernel, 0))
    }

    fn launch_on(&self, stream: StreamId, kernel: &Kernel, pictures: Ptr) -> Result<(), CudaError> {
        let values = kernel.args.iter().map(|arg| {
            Ok(match *arg {
                Arg::In(operand) | Arg::Out(operand) | Arg::InOut(operand) | Arg::Unused(operand) => {
                    self.address(operand, pictures)?
                }
                Arg::U32(value) => u64::from(value),
                Arg::U64(value) => value,
                Arg::F32(value) => u64::from(value.to_bits()),
                Arg::F64(value) => value.to_bits(),
            })
        });
        let values = values.collect::<Result<Vec<_>, CudaError>>()?;
        self.kernels.launch(self.stream(stream)?, kernel.name, kernel.geometry, &values)
    }

    fn stream(&self, stream: StreamId) -> Result<Stream, CudaError> {
        match (stream, &self.reducer) {
            (StreamId::Main, _) => Ok(self.main_stream.0),
            (StreamId::Side, _) => Ok(self.side_stream.0),
            (StreamId::Collectives, Some(reducer)) => Ok(reducer.stream.0),
            (StreamId::Collectives, None) => Err(absent("a group of ranks")),
        }
    }

    fn event(&self, event: EventId) -> Result<&Event, CudaError> {
        self.events.get(&event).ok_or_else(|| absent(&format!("{event:?}")))
    }

    fn address(&self, operand: Operand, pictures: Ptr) -> Result<Ptr, CudaError> {
        if operand.is_none() {
            return Ok(0);
        }
        let base = self.region(operand.region, pictures).ok_or_else(|| absent(&format!("{operand:?}")))?;
        Ok(base.wrapping_add(operand.offset as u64))
    }

    fn region(&self, region: Region, pictures: Ptr) -> Option<Ptr> {
        let scaling =
            |axis: usize| self.scalings.get(&self.plan.network.image_size).map(|tables| &tables[axis].on_gpu);
        let buffer = match region {
            Region::Pictures => return Some(pictures),
            Region::InputRing => return Some(self.inputs.ring.device),
            Region::HostInputCounter => return Some(self.inputs.host_counter.device),
            Region::ResultRing => return Some(self.results.ring.device),
            Region::ScaleRows => scaling(0)?,
            Region::ScaleColumns => scaling(1)?,
            Region::InputCounter => &self.inputs.counter,
            Region::Control => &self.inputs.control,
            Region::ResultCounter => &self.results.counter,
            Region::MatrixGradients => {
                // Offsets count from the first matrix, but the buffer begins with the first stored gradient.
                let absent_bytes = (self.unstored_len * self.plan.dtype.size()) as u64;
                return Some(self.matrix_gradients.ptr.wrapping_sub(absent_bytes));
            }
            _ => {
                let of_ranks = || self.reducer.as_ref()?.buffers.get(&region).map(|buffer| buffer.ptr);
                let other = || self.buffers.get(&region).map(|buffer| buffer.ptr);
                return self.state.address(region).or_else(of_ranks).or_else(other);
            }
        };
        Some(buffer.ptr)
    }
}

/// The error for a command that needs `what`, which this engine does not have because of a bug in emission.
fn absent(what: &str) -> CudaError {
    CudaError::Unsupported(format!(
        "a step needs {what}, which this engine does not have (a bug in lockstep)"
    ))
}
