//! Fused operations as text, for people and for pinning tests.

use super::{Conv, ConvBackward, ConvForward, FusedOp, Norm, NormForward, StatisticsIn};
use std::fmt::{Display, Formatter, Result};

impl Display for FusedOp {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            FusedOp::Conv(conv) => conv.fmt(f),
            FusedOp::Norm(norm) => norm.fmt(f),
            FusedOp::Relu { input, output } => write!(f, "relu t{input} -> t{output}"),
            FusedOp::Gelu { bias: None, input, output } => write!(f, "gelu t{input} -> t{output}"),
            FusedOp::Gelu { bias: Some(name), input, output } => {
                write!(f, "gelu t{input} + {name}.bias -> t{output}")
            }
            FusedOp::Add { branch, shortcut, output } => {
                write!(f, "add t{branch} + t{shortcut} -> t{output}")
            }
            FusedOp::MaxPool { input, output, kernel, stride, .. } => {
                write!(f, "max_pool {kernel}x{kernel} stride {stride} t{input} -> t{output}")
            }
            FusedOp::GlobalAveragePool { input, output, gradient_in_norm } => {
                write!(f, "global_average_pool t{input} -> t{output}")?;
                write_if(f, *gradient_in_norm, "gradient spread by the batch norm before it")
            }
            FusedOp::Redistribute { input, output } => write!(f, "redistribute t{input} -> t{output}"),
            FusedOp::Halo { input, output, .. } => write!(f, "halo t{input} -> t{output}"),
            FusedOp::MeanOfRows { input, output } => write!(f, "mean_of_rows t{input} -> t{output}"),
            FusedOp::Linear { name, input, output, .. } => write!(f, "linear {name} t{input} -> t{output}"),
        }
    }
}

fn write_if(f: &mut Formatter<'_>, condition: bool, text: &str) -> Result {
    if condition { write!(f, "; {text}") } else { Ok(()) }
}

impl Display for Conv {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (name, shape) = (&self.name, &self.shape);
        let (kernel, stride, groups) = (shape.kernel, shape.stride, shape.groups);
        write!(f, "conv {name} {kernel}x{kernel}")?;
        if stride > 1 {
            write!(f, " stride {stride}")?;
        }
        if groups > 1 {
            write!(f, " groups {groups}")?;
        }
        write!(f, " {} -> {} channels, t{} -> t{}", shape.in_c, shape.out_c, self.input, self.output)?;
        match self.forward {
            ConvForward::Plain { early_statistics } => write_if(f, early_statistics, "then its statistics")?,
            ConvForward::WithNorms { norm_before: None } => write!(f, "; forward with its statistics")?,
            ConvForward::WithNorms { norm_before: Some(before) } => {
                write!(f, "; forward with the application of norm {before} and its statistics")?;
            }
            ConvForward::WithBlockEnd { block_end } => {
                write!(f, "; forward with the block end of norm {block_end} and its statistics")?;
            }
        }
        match self.backward {
            ConvBackward::Plain => Ok(()),
            ConvBackward::DgradInNorm => write!(f, "; dgrad in the batch norm before it"),
            ConvBackward::WithNorms { norm_before: None } => {
                write!(f, "; dgrad and wgrad with the application of the batch norm after it")
            }
            ConvBackward::WithNorms { norm_before: Some(before) } => {
                write!(
                    f,
                    "; dgrad and wgrad with the application of the batch norm after it and the sums of norm {before}"
                )
            }
        }
    }
}

impl Display for Norm {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "norm {} {} t{}", self.norm, self.name, self.input)?;
        match self.shortcut {
            None => {}
            Some(shortcut) => match shortcut.deferred {
                None => write!(f, " + t{}", shortcut.tensor)?,
                Some(norm) => write!(f, " + norm {} of t{}", norm.norm, norm.input)?,
            },
        }
        write_if(f, self.relu, "relu")?;
        write_if(f, self.pooled, "max_pool 3x3 stride 2")?;
        write!(f, " -> t{}", self.output)?;
        match self.statistics {
            StatisticsIn::Norm => {}
            StatisticsIn::AfterConv => write!(f, "; statistics taken after its convolution")?,
            StatisticsIn::Conv => write!(f, "; statistics taken in its convolution")?,
            StatisticsIn::Frozen => write!(f, "; frozen")?,
        }
        match self.forward {
            NormForward::Here => {}
            NormForward::InShortcut => write!(f, "; applied by the addition")?,
            NormForward::InConv => write!(f, "; applied by the convolution after it")?,
            NormForward::InConvAndStored => write!(f, "; applied and written by the convolution after it")?,
        }
        write_if(f, self.backward_in_conv, "backward applied by its convolution")
    }
}
