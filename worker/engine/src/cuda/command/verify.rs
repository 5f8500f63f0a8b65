//! Checks that a list of commands is free of data races and use of invalid memory, for any timing of the GPU.
//!
//! - Memory is written before it is read, and freed memory is not accessed.
//! - If a command writes memory that another command accesses, a stream or events order the two commands.
//! - Events are recorded before a stream waits for them, and every stream except the main stream begins with a wait.
//! - Collectives run one after another, and all streams join the main stream before the list ends.
//! - Weights and optimizer state change only after the host can see that an update may be under way ([`UPDATING`]). From then on no
//!   command waits for other ranks. Exception: ranks that divide the optimizer's state exchange norms and new weights. No single rank
//!   then has the whole state of an interrupted step, so the host does not try to recover this state.
//!
//! The check uses vector clocks: for each stream, how many commands of every stream are known to have completed.

use super::{Access, Command, EventId, Operand, Region, StreamId, UPDATING};
use std::collections::{BTreeMap, HashMap};

/// By stream: number of commands that are known to have completed.
type Clock = [usize; StreamId::ALL.len()];

/// Checks a list of commands. With `carries_over`, the list continues from the gradients and totals of an earlier micro-batch. The error
/// names the first invalid command and the reason.
pub(in crate::cuda) fn verify(commands: &[Command], carries_over: bool) -> Result<(), String> {
    let mut check = Check { carries_over, ..Check::default() };
    for (number, command) in commands.iter().enumerate() {
        check
            .check_command(command)
            .map_err(|error| format!("command {number}, {}: {error}", describe(command)))?;
    }
    check.end()
}

/// Collectives and exchanges in launch order, which must be the same on all ranks of a group.
#[cfg(test)]
pub(in crate::cuda) fn collective_calls(commands: &[Command]) -> Vec<String> {
    let is_exchanged = |operand: &Operand| operand.region == Region::PeerSequences;
    commands
        .iter()
        .filter_map(|command| match command {
            Command::Collective { stream, kind, group, count, dtype, .. } => {
                Some(format!("{kind:?} {group:?} {stream:?} {count} {dtype:?}"))
            }
            Command::Exchange { stream, group, .. } => Some(format!("Exchange {group:?} {stream:?}")),
            Command::Kernel { .. } => {
                let accesses = command.accesses();
                let (operand, _) = accesses.iter().find(|(operand, _)| is_exchanged(operand))?;
                Some(format!("exchange at {}", operand.offset))
            }
            _ => None,
        })
        .collect()
}

fn describe(command: &Command) -> String {
    match command {
        Command::Kernel { stream, kernel } => format!("{} on {stream:?}", kernel.name),
        Command::Convolution { stream, convolution, .. } => format!("{convolution} on {stream:?}"),
        Command::Collective { stream, kind, group, to, .. } => {
            format!("{kind}{group} to {to:?} on {stream:?}")
        }
        Command::Exchange { stream, group, .. } => format!("exchange{group} on {stream:?}"),
        other => format!("{other:?}"),
    }
}

/// A command's position: the index of its stream, and the command's number on that stream, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    stream: usize,
    number: usize,
}

impl Position {
    /// Whether this command is known to have completed when the stream with index `stream` is at `clock`.
    fn is_before(self, stream: usize, clock: &Clock) -> bool {
        self.stream == stream || clock[self.stream] >= self.number
    }
}

/// A range of a region whose bytes have the same state. The start of the range is its key in [`Check::memory`].
#[derive(Debug, Clone)]
struct Piece {
    end: usize,
    state: MemoryState,
    last_write: Option<Position>,
    /// By stream: the last read since the last write.
    last_reads: [Option<Position>; StreamId::ALL.len()],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryState {
    Initialised,
    Uninitialised,
    /// Not allocated.
    Freed,
}

#[derive(Debug, Default)]
struct Check {
    carries_over: bool,
    clocks: [Clock; StreamId::ALL.len()],
    /// By stream: whether it has waited for an event, as every stream except the main stream must before its first command.
    has_waited: [bool; StreamId::ALL.len()],
    events: HashMap<EventId, Clock>,
    memory: HashMap<Region, BTreeMap<usize, Piece>>,
    /// By offset: the end of each allocation in the arena.
    allocations: BTreeMap<usize, usize>,
    /// The newest collective or exchange by NCCL.
    last_collective: Option<Position>,
    /// Whether a command so far has set [`UPDATING`], so that weights may change.
    may_update: bool,
}

impl Check {
    fn check_command(&mut self, command: &Command) -> Result<(), String> {
        match *command {
            Command::Alloc { at, .. } => return self.alloc(at),
            Command::Free { at } => return self.free(at),
            _ => {}
        }
        let Some(stream) = command.stream().map(|stream| stream as usize) else { return Ok(()) };
        match *command {
            Command::Wait { event, .. } => {
                let recorded =
                    *self.events.get(&event).ok_or_else(|| format!("{event:?} has not been recorded"))?;
                for (known, completed) in self.clocks[stream].iter_mut().zip(recorded) {
                    *known = completed.max(*known);
                }
                self.has_waited[stream] = true;
                return Ok(());
            }
            _ if stream != StreamId::Main as usize && !self.has_waited[stream] => {
                return Err("its stream has not waited for the main stream".into());
            }
            Command::Record { event, .. } => {
                self.events.insert(event, self.clocks[stream]);
                return Ok(());
            }
            _ => {}
        }
        self.clocks[stream][stream] += 1;
        let position = Position { stream, number: self.clocks[stream][stream] };
        let accesses = command.accesses();
        self.check_update(command, &accesses, stream)?;
        // A command reads its operands before it writes.
        for (operand, access) in &accesses {
            if *access != Access::Write {
                self.read(*operand, position)?;
            }
        }
        for (operand, access) in accesses {
            if access != Access::Read {
                self.write(operand, position)?;
            }
        }
        if command.waits_for_ranks() {
            if self.last_collective.is_some_and(|last| !last.is_before(stream, &self.clocks[stream])) {
                return Err("the collective before it may still run".into());
            }
            self.last_collective = Some(position);
        }
        Ok(())
    }

    /// Checks that the host can see when an update begins, and that no command waits for other ranks during an update.
    fn check_update(
        &mut self,
        command: &Command,
        accesses: &[(Operand, Access)],
        stream: usize,
    ) -> Result<(), String> {
        let written = || accesses.iter().filter(|(_, access)| *access != Access::Read).map(|(o, _)| *o);
        let is_trained = |operand: Operand| {
            matches!(operand.region, Region::Weights | Region::LowPrecision | Region::OptimizerSlot(_))
        };
        // Ranks that divide the optimizer's state wait for each other during the update: they reduce norms and gather weights.
        let is_of_update = |to: Operand| is_trained(to) || to.region == Region::SegmentSquares;
        let waits_for_ranks = match *command {
            Command::Collective { to, .. } => !is_of_update(to),
            _ => {
                command.waits_for_ranks() || written().any(|operand| operand.region == Region::PeerSequences)
            }
        };
        if self.may_update && waits_for_ranks {
            return Err("it waits for other ranks after an update may have begun".into());
        }
        if !self.may_update && written().any(is_trained) {
            return Err("it changes weights before the host can see that an update may be under way".into());
        }
        if written().any(|operand| operand == UPDATING) {
            if self.last_collective.is_some_and(|last| !last.is_before(stream, &self.clocks[stream])) {
                return Err("an update may begin before the last collective has ended".into());
            }
            self.may_update = true;
        }
        Ok(())
    }

    /// Checks that the work of all other streams completes before any work after the list.
    fn end(&self) -> Result<(), String> {
        let main = self.clocks[StreamId::Main as usize];
        for (stream, clock) in self.clocks.iter().enumerate() {
            if main[stream] < clock[stream] {
                return Err(format!("the list ends while {:?} may still run", StreamId::ALL[stream]));
            }
        }
        Ok(())
    }

    fn alloc(&mut self, at: Operand) -> Result<(), String> {
        let before = self.allocations.range(..at.end()).next_back();
        if let Some((offset, end)) = before.filter(|(_, end)| **end > at.offset) {
            return Err(format!("{offset}..{end} is allocated"));
        }
        self.allocations.insert(at.offset, at.end());
        self.pieces(at).for_each(|piece| piece.state = MemoryState::Uninitialised);
        Ok(())
    }

    fn free(&mut self, at: Operand) -> Result<(), String> {
        if self.allocations.get(&at.offset) != Some(&at.end()) {
            return Err("it is not allocated".into());
        }
        self.allocations.remove(&at.offset);
        self.pieces(at).for_each(|piece| piece.state = MemoryState::Freed);
        Ok(())
    }

    /// Checks that the command at `position` may read `operand`, and notes the read.
    fn read(&mut self, operand: Operand, position: Position) -> Result<(), String> {
        self.check_allocated(operand)?;
        let clock = self.clocks[position.stream];
        for piece in self.pieces(operand) {
            check_order(piece.last_write, position, &clock, "writes", operand)?;
            match piece.state {
                MemoryState::Initialised => {}
                MemoryState::Uninitialised => {
                    return Err(format!("{operand:?} is read before it is written"));
                }
                MemoryState::Freed => return Err(format!("{operand:?} is freed")),
            }
            piece.last_reads[position.stream] = Some(position);
        }
        Ok(())
    }

    /// Checks that the command at `position` may write `operand`, and notes the write.
    fn write(&mut self, operand: Operand, position: Position) -> Result<(), String> {
        self.check_allocated(operand)?;
        let clock = self.clocks[position.stream];
        for piece in self.pieces(operand) {
            check_order(piece.last_write, position, &clock, "writes", operand)?;
            for last_read in piece.last_reads {
                check_order(last_read, position, &clock, "reads", operand)?;
            }
            piece.state = MemoryState::Initialised;
            piece.last_write = Some(position);
            piece.last_reads = Default::default();
        }
        Ok(())
    }

    fn check_allocated(&self, operand: Operand) -> Result<(), String> {
        let allocation = self.allocations.range(..=operand.offset).next_back();
        if operand.region == Region::Arena && allocation.is_none_or(|(_, end)| *end < operand.end()) {
            return Err(format!("{operand:?} is not inside an allocation"));
        }
        Ok(())
    }

    /// The pieces of a range, split so that they begin and end with the range.
    fn pieces(&mut self, operand: Operand) -> impl Iterator<Item = &mut Piece> {
        let Operand { region, offset, .. } = operand;
        let state = match region {
            Region::Arena => MemoryState::Freed,
            _ if is_initialised(region, self.carries_over) => MemoryState::Initialised,
            _ => MemoryState::Uninitialised,
        };
        let all = Piece { end: usize::MAX, state, last_write: None, last_reads: Default::default() };
        let pieces = self.memory.entry(region).or_insert_with(|| BTreeMap::from([(0, all)]));
        for at in [offset, operand.end()] {
            if let Some((_, before)) = pieces.range_mut(..at).next_back()
                && before.end > at
            {
                let after = before.clone();
                before.end = at;
                pieces.insert(at, after);
            }
        }
        pieces.range_mut(offset..operand.end()).map(|(_, piece)| piece)
    }
}

/// Checks that the command at `earlier` is known to have completed when the command at `position` starts. `accesses` is a verb for the error.
fn check_order(
    earlier: Option<Position>,
    position: Position,
    clock: &Clock,
    accesses: &str,
    operand: Operand,
) -> Result<(), String> {
    if earlier.is_some_and(|earlier| !earlier.is_before(position.stream, clock)) {
        return Err(format!("the command that {accesses} {operand:?} may still run"));
    }
    Ok(())
}

/// Whether a region is initialised when a list begins: it outlives a step or, with `carries_over`, a micro-batch.
fn is_initialised(region: Region, carries_over: bool) -> bool {
    match region {
        Region::MatrixGradients
        | Region::VectorGradients
        | Region::Accumulated
        | Region::Totals
        | Region::Stamps => carries_over,
        Region::Pictures
        | Region::Normalisation
        | Region::ClassWeights
        | Region::ScaleRows
        | Region::ScaleColumns
        | Region::InputRing
        | Region::InputCounter
        | Region::HostInputCounter
        | Region::ResultRing
        | Region::ResultCounter
        | Region::InputGradient
        | Region::Weights
        | Region::LowPrecision
        | Region::OptimizerSlot(_)
        | Region::RunningStatistics
        | Region::KeptStatistics
        | Region::KeptSteps
        | Region::AverageWeights
        | Region::AverageStatistics
        | Region::PeerTable
        | Region::PeerSequences
        | Region::Scaler
        | Region::Segments
        | Region::Policies
        | Region::CheckResult
        | Region::Scratch => true,
        _ => false,
    }
}
