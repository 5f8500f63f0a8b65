//! Descriptions of networks for people: layers with kinds, shapes and numbers of parameters.

use super::{Network, Op};
use lockstep_protocol::network::{LayerDescription, NetworkDescription};
use std::collections::HashMap;

impl Network {
    /// The network's layers in forward order, one for each operation. A layer without parameters is named after its
    /// block: the first ReLU of `layer1.0` is `layer1.0.relu`, the second one `layer1.0.relu2`.
    pub fn describe(&self) -> NetworkDescription {
        let mut trained: HashMap<String, u64> = HashMap::new();
        for parameter in self.parameters().iter().filter(|p| self.trains(p)) {
            let layer = parameter.name.rsplit_once('.').map_or("", |(layer, _)| layer);
            *trained.entry(layer.to_owned()).or_default() += parameter.len() as u64;
        }
        let mut names = Names::default();
        let layers = self.ops.iter().map(|op| {
            let (name, kind) = (names.name(op), self.kind(op));
            let shape = self.tensors[op.output()];
            let output_shape = match op {
                Op::Linear { .. } => vec![shape.channels as u32],
                _ => [shape.channels, shape.height, shape.width].map(|side| side as u32).to_vec(),
            };
            let parameters = trained.get(&name).copied().unwrap_or(0);
            LayerDescription { name, kind, output_shape, parameters, time_us: None, plan: None }
        });
        NetworkDescription { layers: layers.collect(), ..NetworkDescription::default() }
    }

    fn kind(&self, op: &Op) -> String {
        match *op {
            Op::Conv { kernel, stride, groups, .. } => {
                let mut kind = format!("conv {kernel}x{kernel}");
                if stride > 1 {
                    kind += &format!(" stride {stride}");
                }
                if groups > 1 {
                    kind += &format!(" groups {groups}");
                }
                kind
            }
            Op::BatchNorm { .. } if self.frozen_norm => "frozen batch_norm".into(),
            Op::BatchNorm { .. } => "batch_norm".into(),
            Op::Relu { .. } => "relu".into(),
            Op::Gelu { bias: None, .. } => "gelu".into(),
            Op::Gelu { bias: Some(_), .. } => "gelu with bias".into(),
            Op::Add { .. } => "add".into(),
            Op::MaxPool { kernel, stride, .. } => format!("max_pool {kernel}x{kernel} stride {stride}"),
            Op::GlobalAveragePool { .. } => "global_average_pool".into(),
            Op::Linear { .. } => "linear".into(),
            Op::Redistribute { .. } => "redistribute".into(),
            Op::Halo { .. } => "halo".into(),
            Op::MeanOfRows { .. } => "mean_of_rows".into(),
        }
    }
}

/// Names of the layers described so far.
#[derive(Default)]
struct Names {
    /// Name of the newest layer with parameters, up to its last dot and without `downsample`.
    block: String,
    used: HashMap<String, u32>,
}

impl Names {
    /// The name of the next operation.
    fn name(&mut self, op: &Op) -> String {
        let kind = match op {
            Op::Conv { name, .. } | Op::BatchNorm { name, .. } | Op::Linear { name, .. } => {
                let block = name.rsplit_once('.').map_or("", |(block, _)| block);
                self.block = block.trim_end_matches("downsample").trim_end_matches('.').into();
                return name.clone();
            }
            // torchvision's names.
            Op::Relu { .. } => "relu",
            Op::Gelu { .. } => "gelu",
            Op::Add { .. } => "add",
            Op::MaxPool { .. } => "maxpool",
            Op::Redistribute { .. } => "redistribute",
            Op::Halo { .. } => "halo",
            Op::MeanOfRows { .. } => "mean_of_rows",
            Op::GlobalAveragePool { .. } => {
                self.block.clear();
                "avgpool"
            }
        };
        let name = if self.block.is_empty() { kind.to_owned() } else { format!("{}.{kind}", self.block) };
        let count = self.used.entry(name.clone()).or_default();
        *count += 1;
        if *count > 1 { format!("{name}{count}") } else { name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resnet;
    use lockstep_protocol::spec::{Arch, ModelSpec};
    use std::collections::BTreeSet;

    #[test]
    fn resnet18_is_described_layer_by_layer() {
        let found = resnet::of(Arch::ResNet18, 224, 10).describe();
        let text = |layer: &LayerDescription| {
            let shape: Vec<_> = layer.output_shape.iter().map(u32::to_string).collect();
            format!("{} {} [{}] {}", layer.name, layer.kind, shape.join(" "), layer.parameters)
        };
        let lines: Vec<_> = found.layers.iter().map(text).collect();
        assert_eq!(
            lines[..8],
            [
                "conv1 conv 7x7 stride 2 [64 112 112] 9408",
                "bn1 batch_norm [64 112 112] 128",
                "relu relu [64 112 112] 0",
                "maxpool max_pool 3x3 stride 2 [64 56 56] 0",
                "layer1.0.conv1 conv 3x3 [64 56 56] 36864",
                "layer1.0.bn1 batch_norm [64 56 56] 128",
                "layer1.0.relu relu [64 56 56] 0",
                "layer1.0.conv2 conv 3x3 [64 56 56] 36864",
            ]
        );
        assert!(lines.contains(&"layer2.0.add add [128 28 28] 0".to_owned()), "{lines:#?}");
        assert!(lines.contains(&"layer2.0.relu2 relu [128 28 28] 0".to_owned()), "{lines:#?}");
        assert_eq!(
            lines[lines.len() - 2..],
            ["avgpool global_average_pool [512 1 1] 0", "fc linear [10] 5130"]
        );
    }

    #[test]
    fn descriptions_obey_the_limits_and_count_every_parameter() {
        for arch in Arch::ALL {
            for freeze_norm in [false, true] {
                let model = ModelSpec { arch, freeze_norm, ..ModelSpec::default() };
                let network = crate::net::build(&model, 64, 3, 10).unwrap();
                let found = network.describe();
                assert_eq!(found.check(), Ok(()), "{arch}");
                let names: BTreeSet<_> = found.layers.iter().map(|layer| &layer.name).collect();
                assert_eq!(names.len(), found.layers.len(), "{arch}: names are unique");
                let counted: u64 = found.layers.iter().map(|layer| layer.parameters).sum();
                let frozen =
                    network.parameters().into_iter().filter(|p| p.role.is_trained() && !network.trains(p));
                let frozen: u64 = frozen.map(|p| p.len() as u64).sum();
                assert_eq!(counted + frozen, network.parameter_count() as u64, "{arch}");
                assert_eq!(frozen > 0, freeze_norm || arch == Arch::CifarNet, "{arch}");
            }
        }
    }
}
