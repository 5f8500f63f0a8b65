//! Networks as ONNX files (<https://onnx.ai/onnx/repo-docs/IR.html>), for other programs that run models.

mod messages;

use crate::{
    EngineError, Margin, check,
    net::{Network, Op, TensorId},
};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_kernels::batch_norm::EPSILON;
use messages::{
    Attribute, Dimension, FLOAT, Graph, Model, Node, OperatorSetId, StringStringEntry, Tensor, TensorShape,
    TensorType, Type, ValueInfo,
};
use prost::Message as _;
use std::collections::BTreeMap;

/// Version of ONNX's operators. onnxruntime 1.12 and later read it.
const OPSET: i64 = 17;
/// Version of the format that came with [`OPSET`].
const IR_VERSION: i64 = 8;
/// Name of the dynamic dimension, the number of pictures.
const BATCH: &str = "N";
/// Names and values of the constants of GELU.
const SQRT_2: (&str, f32) = ("sqrt2", std::f32::consts::SQRT_2);
const ONE: (&str, f32) = ("one", 1.0);
const HALF: (&str, f32) = ("half", 0.5);

/// Encodes a whole network with its parameters and running statistics. The input `input` is normalised pictures, float32
/// `[N, channels, image_size, image_size]`. The output `output` is `[N, classes]` logits, or `[N, features]` embeddings if the
/// network has no head. `N` is dynamic. `margin` is the margin with which the network was trained. With `fold_batch_norm`,
/// each batch norm that follows a convolution becomes part of the convolution. `metadata` becomes `metadata_props`.
///
/// # Errors
/// [`EngineError::Parameters`]: the tensors do not fit the network, or `network` is only a rank's part of a network.
pub fn encode(
    network: &Network,
    tensors: &NamedTensors,
    margin: Option<&Margin>,
    fold_batch_norm: bool,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, EngineError> {
    check::check(network, tensors)?;
    let entry =
        |(key, value): (&String, &String)| StringStringEntry { key: key.clone(), value: value.clone() };
    let model = Model {
        ir_version: IR_VERSION,
        producer_name: "lockstep".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        graph: Some(build_graph(network, tensors, margin, fold_batch_norm)?),
        opset_import: vec![OperatorSetId { domain: String::new(), version: OPSET }],
        metadata_props: metadata.iter().map(entry).collect(),
    };
    Ok(model.encode_to_vec())
}

/// Builds the graph. Nodes and their outputs have the names of [`Network::describe`]; the last output is `output`.
fn build_graph(
    network: &Network,
    tensors: &NamedTensors,
    margin: Option<&Margin>,
    fold_batch_norm: bool,
) -> Result<Graph, EngineError> {
    let mut graph = Graph { name: network.arch.clone(), ..Graph::default() };
    let side = network.image_size;
    graph.input.push(value_info("input", &[network.channels, side, side]));
    graph.output.push(value_info("output", &[network.tensors[network.logits()].len()]));
    // The input of the head, or the output if there is no head: `[N, features]`.
    let features = match network.ops.last() {
        Some(Op::Linear { input, .. }) => *input,
        _ => network.logits(),
    };
    if network.ops.iter().any(|op| matches!(op, Op::Gelu { .. })) {
        let scalar = |(name, value)| tensor(name, &HostTensor { shape: Vec::new(), values: vec![value] });
        graph.initializer.extend([SQRT_2, ONE, HALF].map(scalar));
    }
    let is_of_convolution = |tensor: &TensorId| {
        network.ops.iter().any(|op| matches!(op, Op::Conv { output, .. } if output == tensor))
    };
    // Names of values, by tensor.
    let mut values = vec![String::from("input"); network.tensors.len()];
    for (op, layer) in network.ops.iter().zip(network.describe().layers) {
        let mut name = layer.name.clone();
        let mut inputs: Vec<String> = op.inputs().into_iter().map(|input| values[input].clone()).collect();
        let parameter = |suffix: &str| format!("{}.{suffix}", layer.name);
        let (mut op_type, mut attributes) = match op {
            Op::Conv { output, kernel, stride, padding, groups, .. } => {
                let (weight, bias) = (parameter("weight"), parameter("bias"));
                let parameters = match network.ops.iter().find(|op| op.inputs().contains(output)) {
                    Some(Op::BatchNorm { name, .. }) if fold_batch_norm => {
                        let (scaled, shift) = fold_into_convolution(&tensors[&weight], name, tensors);
                        vec![tensor(&weight, &scaled), tensor(&bias, &shift)]
                    }
                    Some(Op::Gelu { bias: Some(module), .. }) => {
                        let shift = &tensors[&format!("{module}.bias")];
                        vec![tensor(&weight, &tensors[&weight]), tensor(&bias, shift)]
                    }
                    _ => vec![tensor(&weight, &tensors[&weight])],
                };
                inputs.extend(parameters.iter().map(|parameter| parameter.name.clone()));
                graph.initializer.extend(parameters);
                let mut attributes = window_attributes(*kernel, *stride, *padding);
                attributes.push(Attribute::int("group", *groups));
                ("Conv", attributes)
            }
            // Folded into the convolution, whose output has no other reader.
            Op::BatchNorm { input, output, .. } if fold_batch_norm && is_of_convolution(input) => {
                values[*output] = values[*input].clone();
                continue;
            }
            Op::BatchNorm { .. } => {
                for suffix in ["weight", "bias", "running_mean", "running_var"] {
                    let name = parameter(suffix);
                    graph.initializer.push(tensor(&name, &tensors[&name]));
                    inputs.push(name);
                }
                ("BatchNormalization", vec![Attribute::float("epsilon", EPSILON as f32)])
            }
            Op::Relu { .. } => ("Relu", Vec::new()),
            Op::Add { .. } => ("Add", Vec::new()),
            Op::MaxPool { kernel, stride, padding, .. } => {
                ("MaxPool", window_attributes(*kernel, *stride, *padding))
            }
            Op::GlobalAveragePool { .. } => ("GlobalAveragePool", Vec::new()),
            Op::Linear { .. } => {
                let (weight, bias) = (parameter("weight"), parameter("bias"));
                if let Some(margin) = margin.filter(|_| op.output() == network.logits()) {
                    let attributes = vec![Attribute::int("axis", 1), Attribute::int("p", 2)];
                    graph.node.push(node("LpNormalization", "normalize", inputs, "normalize", attributes));
                    let HostTensor { shape, values } = &tensors[&weight];
                    let scaled = HostTensor {
                        shape: shape.clone(),
                        values: margin.scaled_unit_rows(values, shape[1]),
                    };
                    graph.initializer.push(tensor(&weight, &scaled));
                    inputs = vec!["normalize".into(), weight];
                } else {
                    graph.initializer.extend([&weight, &bias].map(|name| tensor(name, &tensors[name])));
                    inputs.extend([weight, bias]);
                }
                ("Gemm", vec![Attribute::int("transB", 1)])
            }
            // x (1 + erf(x / sqrt(2))) / 2, as torch.onnx writes it. The bias is part of the convolution that computes x.
            Op::Gelu { .. } => {
                let mut value = inputs[0].clone();
                let steps = [
                    ("Div", Some(SQRT_2.0)),
                    ("Erf", None),
                    ("Add", Some(ONE.0)),
                    ("Mul", Some(&*inputs[0])),
                ];
                for (op_type, operand) in steps {
                    let name = format!("{name}.{}", op_type.to_lowercase());
                    let operands = std::iter::once(value).chain(operand.map(str::to_owned)).collect();
                    graph.node.push(node(op_type, &name, operands, &name, Vec::new()));
                    value = name;
                }
                inputs = vec![value, HALF.0.into()];
                ("Mul", Vec::new())
            }
            Op::Redistribute { .. } | Op::Halo { .. } | Op::MeanOfRows { .. } => {
                let detail =
                    format!("{} is a rank's part of a network; ONNX files have whole networks", network.arch);
                return Err(EngineError::Parameters(detail));
            }
        };
        if op.output() == features {
            graph.node.push(node(op_type, &name, inputs, &name, attributes));
            (op_type, inputs, attributes) = ("Flatten", vec![name], Vec::new());
            name = "flatten".into();
        }
        let output = if op.output() == network.logits() { "output".to_owned() } else { name.clone() };
        graph.node.push(node(op_type, &name, inputs, &output, attributes));
        values[op.output()] = output;
    }
    Ok(graph)
}

/// Weight and bias of the convolution that computes `gamma (conv(x) - mean) / sqrt(var + epsilon) + beta`, with the
/// parameters and running statistics of the batch norm `norm`.
fn fold_into_convolution(
    weight: &HostTensor,
    norm: &str,
    tensors: &NamedTensors,
) -> (HostTensor, HostTensor) {
    let parameter =
        |suffix: &str| tensors[&format!("{norm}.{suffix}")].values.iter().map(|&value| f64::from(value));
    let factors: Vec<f64> = parameter("weight")
        .zip(parameter("running_var"))
        .map(|(gamma, var)| gamma / (var + EPSILON).sqrt())
        .collect();
    let mut weight = weight.clone();
    let filter = weight.values.len() / factors.len();
    for (filter, factor) in weight.values.chunks_exact_mut(filter).zip(&factors) {
        filter.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    }
    let shifts = parameter("bias").zip(parameter("running_mean")).zip(&factors);
    let values: Vec<f32> = shifts.map(|((beta, mean), factor)| (beta - mean * factor) as f32).collect();
    (weight, HostTensor { shape: vec![values.len()], values })
}

fn window_attributes(kernel: usize, stride: usize, padding: usize) -> Vec<Attribute> {
    vec![
        Attribute::ints("kernel_shape", [kernel; 2]),
        Attribute::ints("strides", [stride; 2]),
        Attribute::ints("pads", [padding; 4]),
    ]
}

fn node(op_type: &str, name: &str, input: Vec<String>, output: &str, attribute: Vec<Attribute>) -> Node {
    Node { input, output: vec![output.into()], name: name.into(), op_type: op_type.into(), attribute }
}

fn tensor(name: &str, from: &HostTensor) -> Tensor {
    Tensor {
        dims: from.shape.iter().map(|&size| size as i64).collect(),
        data_type: FLOAT,
        name: name.into(),
        raw_data: bytemuck::cast_slice(&from.values).to_vec(),
    }
}

/// An input or output of the graph. `shape` is the shape of one picture's values.
fn value_info(name: &str, shape: &[usize]) -> ValueInfo {
    let batch = Dimension { dim_value: None, dim_param: Some(BATCH.into()) };
    let sizes = shape.iter().map(|&size| Dimension { dim_value: Some(size as i64), dim_param: None });
    let shape = TensorShape { dim: std::iter::once(batch).chain(sizes).collect() };
    let tensor = TensorType { elem_type: FLOAT, shape: Some(shape) };
    ValueInfo { name: name.into(), r#type: Some(Type { tensor_type: Some(tensor) }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{self, init::initial_parameters, resnet};
    use lockstep_protocol::spec::{Arch, LossKind, ModelSpec, Stem};
    use std::collections::BTreeSet;

    #[test]
    fn every_value_is_computed_before_it_is_read() {
        let arc_face = Margin { kind: LossKind::ArcFace, scale: 8.0, margin: 0.5 };
        for arch in [Arch::ResNet20, Arch::ResNet18, Arch::ResNeXt50_32x4d, Arch::CifarNet] {
            let cases = [
                (Stem::Cifar, false, None, true),
                (Stem::Imagenet, false, Some(&arc_face), true),
                (Stem::Imagenet, true, None, true),
                (Stem::Imagenet, true, None, false),
            ];
            for (stem, fold, margin, has_head) in cases {
                let model = ModelSpec { arch, stem, ..ModelSpec::default() };
                let mut network = net::build(&model, 40, 1, 10).unwrap();
                if !has_head {
                    network = network.without_head();
                }
                let case = format!("{arch:?}, {stem:?}, folded: {fold}, head: {has_head}");
                let zeros = network.parameters().into_iter().map(|p| {
                    let values = vec![0.0; p.len()];
                    (p.name, HostTensor { shape: p.shape, values })
                });
                let tensors = zeros.collect();
                let metadata = BTreeMap::from([("classes".into(), "[]".into())]);
                let file = encode(&network, &tensors, margin, fold, &metadata).unwrap();
                let Model { graph, metadata_props, .. } = Model::decode(&file[..]).unwrap();
                assert_eq!((&*metadata_props[0].key, &*metadata_props[0].value), ("classes", "[]"));
                let graph = graph.unwrap();
                let mut known = BTreeSet::from(["input".to_owned()]);
                for Tensor { name, dims, raw_data, .. } in &graph.initializer {
                    assert_eq!(dims.iter().product::<i64>() * 4, raw_data.len() as i64, "{case}: {name}");
                    assert!(known.insert(name.clone()), "{case}: {name}");
                }
                let mut read = BTreeSet::new();
                for Node { name, input, output, .. } in &graph.node {
                    assert!(
                        input.iter().all(|input| known.contains(input)),
                        "{case}: {name} reads {input:?}"
                    );
                    read.extend(input.iter().cloned());
                    assert!(known.insert(output[0].clone()), "{case}: {output:?}");
                }
                known.retain(|name| !read.contains(name));
                assert!(known.iter().eq(["output"]), "{case}: not read: {known:?}");
                // The batch norms of cifarnet that follow a pooling are not folded.
                let can_fold = |ops: &&[Op]| matches!(ops, [Op::Conv { .. }, Op::BatchNorm { .. }]);
                let folded = if fold { network.ops.windows(2).filter(can_fold).count() } else { 0 };
                let gelus = network.ops.iter().filter(|op| matches!(op, Op::Gelu { .. })).count();
                // In addition to a node for each operation: Flatten, with a margin the normalisation, and four more nodes for each GELU.
                let added = 1 + usize::from(margin.is_some()) + 4 * gelus;
                let expected = network.ops.len() + added - folded;
                assert_eq!(graph.node.len(), expected, "{case}");
            }
        }
    }

    #[test]
    fn tensors_of_another_network_are_refused() {
        let network = |classes| resnet::of(Arch::ResNet20, 32, classes);
        let tensors = initial_parameters(&network(10), false, 0);
        let error = encode(&network(11), &tensors, None, true, &BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("fc.weight has shape [10, 64]"), "{error}");
    }

    #[test]
    fn folding_scales_filters_and_shifts_by_running_statistics() {
        let tensor =
            |shape: &[usize], values: &[f32]| HostTensor { shape: shape.into(), values: values.into() };
        let var = |factor: f64| (1.0 / (factor * factor) - EPSILON) as f32;
        let tensors = NamedTensors::from([
            ("n.weight".into(), tensor(&[2], &[1.0, -3.0])),
            ("n.bias".into(), tensor(&[2], &[0.5, 7.0])),
            ("n.running_mean".into(), tensor(&[2], &[4.0, 1.0])),
            ("n.running_var".into(), tensor(&[2], &[var(0.5), var(2.0)])),
        ]);
        let (weight, bias) =
            fold_into_convolution(&tensor(&[2, 2, 1, 1], &[1.0, 2.0, 3.0, 4.0]), "n", &tensors);
        let near = |found: &[f32], expected: &[f32]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5 * b.abs()), "{found:?}");
        };
        near(&weight.values, &[0.5, 1.0, -18.0, -24.0]);
        near(&bias.values, &[-1.5, 13.0]);
        assert_eq!((weight.shape, bias.shape), (vec![2, 2, 1, 1], vec![2]));
    }
}
