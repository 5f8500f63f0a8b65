//! Formats a list of commands as text.

use super::*;
use crate::cuda::command::{Names, Part, to_text};

/// The commands emitted from `facts`, grouped by the parts of the step.
pub(super) fn text(facts: &Facts<'_>, commands: &[Command]) -> String {
    let ops = &facts.plan.ops;
    to_text(commands, &names(facts), |part| match part {
        Part::Begin => "begin".into(),
        Part::Forward(index) => format!("forward {index} {}", ops[index]),
        Part::Loss => "loss".into(),
        Part::Backward(index) => format!("backward {index} {}", ops[index]),
        Part::Update => "update".into(),
    })
}

/// Names of the ranges of parameters and of batch norms' memory.
fn names(facts: &Facts<'_>) -> Names {
    let mut names = Names::default();
    let [counters, partials] = facts.ops.scratch();
    names.insert(counters, "counters", "");
    names.insert(partials, "partial sums", "");
    for parameter in &facts.layout.parameters {
        let Some((name, suffix)) = parameter.name.rsplit_once('.') else { continue };
        if parameter.range.start < facts.layout.matrix_len {
            names.insert(facts.matrix(name), &parameter.name, "");
            names.insert(facts.matrix_gradient(name), &parameter.name, "gradient");
        } else {
            names.insert(facts.layout.vector(name, suffix), &parameter.name, "");
            let gradient = facts.layout.vector_gradient(name, suffix);
            if !gradient.is_none() {
                names.insert(gradient, &parameter.name, "gradient");
            }
        }
    }
    for (number, site) in facts.norms.iter().enumerate() {
        for (operand, part) in [
            (site.gamma, "weight"),
            (site.beta, "bias"),
            (site.running_mean, "running_mean"),
            (site.running_var, "running_var"),
            (site.mean, "mean"),
            (site.inv_std, "inv_std"),
            (site.scale, "scale"),
            (site.bias, "shift"),
            (site.dgamma, "weight gradient"),
            (site.dbeta, "bias gradient"),
            (site.slope, "slope"),
            (site.offset, "offset"),
        ] {
            if !operand.is_none() {
                names.insert(operand, &format!("norm {number}"), part);
            }
        }
    }
    names
}
