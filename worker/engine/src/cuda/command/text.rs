//! Commands as text, with operands named after their content.

use super::{Access, Collective, Command, Content, Geometry, Group, Operand, Part, Region, StreamId};
use std::{
    collections::HashMap,
    fmt::{Display, Formatter, Result, Write},
};

/// The name of a range: `part` of `whole`, or only `whole` if `part` is empty.
#[derive(Debug, Clone)]
struct Name {
    bytes: usize,
    whole: String,
    part: String,
}

/// The names of ranges, by region and offset.
#[derive(Debug, Clone, Default)]
pub(in crate::cuda) struct Names(HashMap<(Region, usize), Name>);

impl Names {
    /// Names a range as `part` of `whole`.
    pub(in crate::cuda) fn insert(&mut self, operand: Operand, whole: &str, part: &str) {
        let Operand { region, offset, bytes } = operand;
        self.0.insert((region, offset), Name { bytes, whole: whole.into(), part: part.into() });
    }

    fn name(&self, operand: Operand) -> Name {
        let Operand { region, offset, bytes } = operand;
        let unnamed = |whole: String| Name { bytes, whole, part: String::new() };
        match self.0.get(&(region, offset)) {
            Some(name) if name.bytes == bytes => name.clone(),
            _ if offset == 0 => unnamed(region.to_string()),
            _ => unnamed(format!("{region} at {offset}")),
        }
    }

    /// A list of operands, with consecutive parts of the same whole joined.
    fn list(&self, operands: &[Operand]) -> String {
        let mut all: Vec<Name> = Vec::new();
        for name in operands.iter().map(|operand| self.name(*operand)) {
            match all.last_mut() {
                Some(last) if last.whole == name.whole && !name.part.is_empty() => {
                    let _ = write!(last.part, "+{}", name.part);
                }
                _ => all.push(name),
            }
        }
        let text = |Name { whole, part, .. }: Name| {
            if part.is_empty() { whole } else { format!("{whole} {part}") }
        };
        all.into_iter().map(text).collect::<Vec<_>>().join(", ")
    }
}

/// The commands as text, one per line. `title` returns the line with which a part of the step begins.
pub(in crate::cuda) fn to_text(
    commands: &[Command],
    names: &Names,
    title: impl Fn(Part) -> String,
) -> String {
    let mut text = String::new();
    let mut names = names.clone();
    for command in commands {
        let line = match command {
            Command::Part(part) => title(*part),
            Command::Alloc { content, at } => {
                names.insert(*at, &content.to_string(), "");
                format!("  alloc {content}: {} at {}", kib(at.bytes), kib(at.offset))
            }
            Command::Free { at } => format!("  free {}", names.name(*at).whole),
            Command::Record { stream, event } => format!("  {stream}: record {event:?}"),
            Command::Wait { stream, event } => format!("  {stream}: wait for {event:?}"),
            Command::Kernel { stream, kernel } => {
                format!("  {stream}: {} {}: {}", kernel.name, kernel.geometry, accesses(command, &names))
            }
            Command::Convolution { stream, convolution, .. } => {
                format!("  {stream}: {convolution}: {}", accesses(command, &names))
            }
            Command::Collective { stream, kind, group, count, dtype, .. } => {
                let what = accesses(command, &names);
                format!("  {stream}: {kind}{group} of {count} {}: {what}", dtype.name())
            }
            Command::Exchange { stream, group, .. } => {
                format!("  {stream}: exchange{group}: {}", accesses(command, &names))
            }
        };
        let _ = writeln!(text, "{line}");
    }
    text
}

/// A command's operands, as in `activation -> output; changes counters`.
fn accesses(command: &Command, names: &Names) -> String {
    let all = command.accesses();
    let list = |kind: Access| {
        let operands: Vec<_> = all.iter().filter(|(_, access)| *access == kind).map(|(o, _)| *o).collect();
        names.list(&operands)
    };
    let [read, written, changed] = [Access::Read, Access::Write, Access::Change].map(list);
    let mut text = read;
    for (what, operands) in [(" -> ", written), ("; changes ", changed)] {
        if !operands.is_empty() {
            text += what;
            text += &operands;
        }
    }
    text.trim_start().to_owned()
}

impl Display for Content {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Content::Activation(tensor) => write!(f, "t{tensor}"),
            Content::Gradient(tensor) => write!(f, "gradient of t{tensor}"),
            Content::ReluMask(norm) => write!(f, "relu_mask of norm {norm}"),
            Content::Argmax(number) => write!(f, "argmax {number}"),
            Content::Head => f.write_str("of the split head"),
            Content::Rows => f.write_str("of shared rows"),
            Content::Channels => f.write_str("of split operators"),
            Content::Stages => f.write_str("of the stages"),
            Content::Update => f.write_str("of the update"),
        }
    }
}

impl Display for Collective {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
        })
    }
}

/// Suffix of a collective; empty for all ranks.
impl Display for Group {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Group::World => "",
            Group::Model => " in the model group",
            Group::Height => " in the height group",
            Group::Data => " in the data group",
            Group::Stage => " between stages",
        })
    }
}

impl Display for StreamId {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            StreamId::Main => "main",
            StreamId::Side => "side",
            StreamId::Collectives => "collectives",
        })
    }
}

/// `grid of block`, both without trailing 1s, then cluster and dynamic shared memory, if any.
impl Display for Geometry {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let sides = |[x, y, z]: [u32; 3]| match (y, z) {
            (1, 1) => x.to_string(),
            (_, 1) => format!("{x}x{y}"),
            _ => format!("{x}x{y}x{z}"),
        };
        write!(f, "{} of {}", sides(self.grid), sides(self.block))?;
        if self.cluster > 1 {
            write!(f, " in clusters of {}", self.cluster)?;
        }
        if self.shared_bytes > 0 {
            write!(f, " with {} B shared", self.shared_bytes)?;
        }
        Ok(())
    }
}

/// The region's name in snake case: `matrix_gradients`.
impl Display for Region {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let mut text = String::new();
        for letter in format!("{self:?}").chars() {
            if letter.is_ascii_uppercase() && !text.is_empty() {
                text.push('_');
            }
            text.push(letter.to_ascii_lowercase());
        }
        f.write_str(&text)
    }
}

fn kib(bytes: usize) -> String {
    if bytes.is_multiple_of(1024) { format!("{} KiB", bytes >> 10) } else { format!("{bytes} B") }
}
