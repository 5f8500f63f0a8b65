//! Convolutions with cuDNN's backend API: the operation graph of one convolution, and execution plans of the engines that can run it. An
//! execution plan is an engine with knob settings, ready to run.

#![allow(unsafe_code)] // The backend API is C: attributes are pointers to arrays of a stated type.

use super::{
    convolution::{Convolution, Direction, Tensors},
    device::{Ptr, Stream},
    dtype::DType,
    error::Result,
};
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t as Heuristic, cudnnDataType_t,
};
use descriptor::{Descriptor, check};
use serde::{Deserialize, Serialize};
use std::ffi::c_void;

mod descriptor;

/// The heuristics that propose engines which are likely to be fast.
pub(super) const FAST_ENGINES: &[Heuristic] = &[Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_B];
/// The heuristic that proposes engines which run every convolution, but may be so slow that timing them takes minutes.
pub(super) const FALLBACK_ENGINES: &[Heuristic] = &[Heuristic::CUDNN_HEUR_MODE_FALLBACK];

/// Maximum number of engine configurations to get from one heuristic.
const MAX_CONFIGURATIONS: usize = 24;

/// An engine and its knob settings, from which the same plan can be rebuilt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    engine: i64,
    /// (knob, value).
    knobs: Vec<(i64, i64)>,
}

/// Library handles. Two streams must not use the same handle at the same time.
pub(super) struct Cudnn {
    main: sys::cudnnHandle_t,
    /// For weight gradients, which may run concurrently with the main stream.
    weight_gradients: sys::cudnnHandle_t,
}

// SAFETY: a handle is not tied to a thread; without `Sync`, only one thread at a time uses it.
unsafe impl Send for Cudnn {}

impl Cudnn {
    pub(super) fn new() -> Result<Self> {
        let mut this = Self { main: std::ptr::null_mut(), weight_gradients: std::ptr::null_mut() };
        // SAFETY: destroyed when this is dropped.
        check(unsafe { sys::cudnnCreate(&mut this.main) }, || "starting cuDNN".into())?;
        // SAFETY: as above.
        check(unsafe { sys::cudnnCreate(&mut this.weight_gradients) }, || "starting cuDNN".into())?;
        Ok(this)
    }

    fn handle(&self, direction: Direction) -> sys::cudnnHandle_t {
        if direction == Direction::Weight { self.weight_gradients } else { self.main }
    }

    /// Version of the library, e.g. 91900 for 9.19.0.
    pub(super) fn version() -> usize {
        // SAFETY: no preconditions.
        unsafe { sys::cudnnGetVersion() }
    }

    pub(super) fn run(&self, stream: Stream, plan: &Plan, tensors: Tensors<Ptr>, workspace: Ptr) -> Result {
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        let count = if plan.convolution.sums { 5 } else { 3 };
        let Tensors { x, w, y, channel_sums } = tensors;
        let square_sums = channel_sums + 4 * plan.convolution.out_c as u64;
        let pointers = [x, w, y, channel_sums, square_sums].map(|address| address as *mut c_void);
        let ids = &[X, W, Y, SUM, SQUARE][..count];
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Type::CUDNN_TYPE_INT64, ids)?;
        let name = Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS;
        pack.set(name, Type::CUDNN_TYPE_VOID_PTR, &pointers[..count])?;
        let workspace = [workspace as *mut c_void];
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Type::CUDNN_TYPE_VOID_PTR, &workspace)?;
        pack.finalize("arguments of a convolution")?;
        // SAFETY: handle, plan and pack are alive; the stream is the caller's.
        unsafe {
            let handle = self.handle(plan.convolution.direction);
            check(sys::cudnnSetStream(handle, stream.0.cast()), || "choosing cuDNN's stream".into())?;
            check(sys::cudnnBackendExecute(handle, plan.descriptor.0, pack.0), || {
                "running a convolution".into()
            })
        }
    }

    /// Plans for `convolution` with the engines that `heuristics` propose ([`FAST_ENGINES`] or [`FALLBACK_ENGINES`]), the likely fastest
    /// first. Each plan is built on demand, which may compile a kernel. With `is_deterministic`, only plans that give the same bits in
    /// every run, according to cuDNN.
    pub(super) fn candidates(
        &self,
        convolution: &Convolution,
        max_workspace_bytes: usize,
        is_deterministic: bool,
        heuristics: &[Heuristic],
    ) -> Result<impl Iterator<Item = Plan>> {
        let graph = self.graph(convolution)?;
        let mut accepted: Vec<(Descriptor, Choice)> = Vec::new();
        for &heuristic in heuristics {
            let Ok(configs) = configurations(&graph, heuristic) else { continue };
            for config in configs {
                let Ok(choice) = choice_of(&config) else { continue };
                if !accepted.iter().any(|(_, known)| *known == choice)
                    && is_acceptable(&config, convolution.dtype, is_deterministic)
                {
                    accepted.push((config, choice));
                }
            }
        }
        let convolution = *convolution;
        let build = move |(config, choice)| self.build(&convolution, config, choice).ok();
        let fits = move |plan: &Plan| plan.workspace_bytes <= max_workspace_bytes;
        Ok(accepted.into_iter().filter_map(build).filter(fits))
    }

    /// Builds the plan of an earlier choice.
    pub(super) fn rebuild(&self, convolution: &Convolution, choice: &Choice) -> Result<Plan> {
        let graph = self.graph(convolution)?;
        let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        engine.set_descriptors(Name::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, &[&graph])?;
        engine.set(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Type::CUDNN_TYPE_INT64, &[choice.engine])?;
        engine.finalize("a chosen engine")?;
        let mut knobs = Vec::new();
        for (knob, value) in &choice.knobs {
            let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)?;
            descriptor.set(
                Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                Type::CUDNN_TYPE_KNOB_TYPE,
                &[*knob as i32],
            )?;
            descriptor.set(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Type::CUDNN_TYPE_INT64, &[*value])?;
            descriptor.finalize("a chosen knob")?;
            knobs.push(descriptor);
        }
        let config = Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;
        config.set_descriptors(Name::CUDNN_ATTR_ENGINECFG_ENGINE, &[&engine])?;
        if !knobs.is_empty() {
            let knobs: Vec<_> = knobs.iter().collect();
            config.set_descriptors(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, &knobs)?;
        }
        config.finalize("a chosen engine's configuration")?;
        self.build(convolution, config, choice.clone())
    }

    fn build(&self, convolution: &Convolution, config: Descriptor, choice: Choice) -> Result<Plan> {
        let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        let handle = self.handle(convolution.direction);
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?;
        plan.set_descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[&config])?;
        plan.finalize("a plan")?;
        let mut bytes = [0i64];
        plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, Type::CUDNN_TYPE_INT64, &mut bytes)?;
        Ok(Plan {
            descriptor: plan,
            convolution: *convolution,
            workspace_bytes: bytes[0].max(0) as usize,
            choice,
        })
    }

    /// The operation graph of one convolution. cuDNN derives the number of groups from the channels of x and w.
    fn graph(&self, c: &Convolution) -> Result<Descriptor> {
        let x = tensor(X, [c.batch, c.in_c, c.in_h, c.in_w], c.dtype)?;
        let w = tensor(W, [c.out_c, c.group_in_c(), c.kernel, c.kernel], c.dtype)?;
        let y = tensor(Y, [c.batch, c.out_c, c.out_h, c.out_w], c.dtype)?;
        let convolution = Descriptor::new(Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
        let float = [cudnnDataType_t::CUDNN_DATA_FLOAT];
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &float)?;
        let mode = [sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION];
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Type::CUDNN_TYPE_CONVOLUTION_MODE, &mode)?;
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, Type::CUDNN_TYPE_INT64, &[2i64])?;
        for (name, values) in [
            (Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, [1, 1]),
            (Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, [c.stride; 2]),
            (Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, [c.row_padding, c.padding]),
            (Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, [c.row_padding, c.padding]),
        ] {
            convolution.set(name, Type::CUDNN_TYPE_INT64, &values.map(|value| value as i64))?;
        }
        convolution.finalize("a convolution")?;

        use Direction::{Forward, Input, Weight};
        let (kind, names) = match c.direction {
            Forward => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                ],
            ),
            Input => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                ],
            ),
            Weight => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                ],
            ),
        };
        let operation = Descriptor::new(kind)?;
        for (name, descriptor) in names.into_iter().zip([&convolution, &x, &w, &y]) {
            operation.set_descriptors(name, &[descriptor])?;
        }
        let [.., alpha, beta] = names;
        operation.set(alpha, Type::CUDNN_TYPE_FLOAT, &[1f32])?;
        operation.set(beta, Type::CUDNN_TYPE_FLOAT, &[0f32])?;
        operation.finalize("an operation")?;
        let statistics = if c.sums { Some(statistics_of(&y, c.out_c)?) } else { None };
        let operations: Vec<&Descriptor> = std::iter::once(&operation).chain(statistics.as_ref()).collect();

        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let handle = self.handle(c.direction);
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?;
        graph.set_descriptors(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        graph.finalize("an operation graph")?;
        Ok(graph)
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        for handle in [self.main, self.weight_gradients] {
            if !handle.is_null() {
                // SAFETY: created by `new`.
                let _ = unsafe { sys::cudnnDestroy(handle) };
            }
        }
    }
}

pub(super) struct Plan {
    descriptor: Descriptor,
    convolution: Convolution,
    pub(super) workspace_bytes: usize,
    pub(super) choice: Choice,
}

// IDs of the tensors in an operation graph. Any distinct numbers are valid.
const X: i64 = 1;
const W: i64 = 2;
const Y: i64 = 3;
// The sums of y and of y * y by channel.
const SUM: i64 = 4;
const SQUARE: i64 = 5;

/// The operation that sums `y` and its squares by channel.
fn statistics_of(y: &Descriptor, channels: usize) -> Result<Descriptor> {
    let sum = tensor(SUM, [1, channels, 1, 1], DType::F32)?;
    let square = tensor(SQUARE, [1, channels, 1, 1], DType::F32)?;
    let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR)?;
    let mode = [sys::cudnnGenStatsMode_t::CUDNN_GENSTATS_SUM_SQSUM];
    operation.set(Name::CUDNN_ATTR_OPERATION_GENSTATS_MODE, Type::CUDNN_TYPE_GENSTATS_MODE, &mode)?;
    let float = [cudnnDataType_t::CUDNN_DATA_FLOAT];
    operation.set(Name::CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, Type::CUDNN_TYPE_DATA_TYPE, &float)?;
    operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_GENSTATS_XDESC, &[y])?;
    operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, &[&sum])?;
    operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, &[&square])?;
    operation.finalize("statistics of a convolution")?;
    Ok(operation)
}

/// Descriptor of a tensor that is in memory in the order NHWC (KRSC for weights). The backend lists dimensions as N, C, H, W.
fn tensor(id: i64, [n, c, h, w]: [usize; 4], dtype: DType) -> Result<Descriptor> {
    let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    let data_type = [match dtype {
        DType::F32 => cudnnDataType_t::CUDNN_DATA_FLOAT,
        DType::F16 => cudnnDataType_t::CUDNN_DATA_HALF,
        DType::Bf16 => cudnnDataType_t::CUDNN_DATA_BFLOAT16,
    }];
    tensor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &data_type)?;
    let dimensions = [n, c, h, w].map(|v| v as i64);
    let strides = [h * w * c, 1, w * c, c].map(|v| v as i64);
    tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Type::CUDNN_TYPE_INT64, &dimensions)?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, Type::CUDNN_TYPE_INT64, &strides)?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Type::CUDNN_TYPE_INT64, &[id])?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Type::CUDNN_TYPE_INT64, &[16i64])?;
    tensor.finalize("a tensor")?;
    Ok(tensor)
}

fn configurations(graph: &Descriptor, heuristic: Heuristic) -> Result<Vec<Descriptor>> {
    let query = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    query.set_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?;
    query.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, &[heuristic])?;
    query.finalize("a heuristic")?;
    let kind = Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    query.get_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind, MAX_CONFIGURATIONS)
}

fn engine_of(config: &Descriptor) -> Result<Descriptor> {
    let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
    let mut descriptors = [engine.0];
    config.get(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut descriptors)?;
    Ok(engine)
}

fn choice_of(config: &Descriptor) -> Result<Choice> {
    let mut index = [0i64];
    engine_of(config)?.get(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Type::CUDNN_TYPE_INT64, &mut index)?;
    let (name, kind) = (Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    let mut knobs = Vec::new();
    for choice in config.get_descriptors(name, kind, 32).unwrap_or_default() {
        let (mut knob, mut value) = ([0i32], [0i64]);
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, Type::CUDNN_TYPE_KNOB_TYPE, &mut knob)?;
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Type::CUDNN_TYPE_INT64, &mut value)?;
        knobs.push((i64::from(knob[0]), value[0]));
    }
    Ok(Choice { engine: index[0], knobs })
}

/// Whether a configuration's engine accumulates in float32 and, if `is_deterministic`, computes the same bits in every run. For float32
/// tensors, it must also use neither tensor cores, which round their inputs to 10 bits (TF32), nor other inexact methods.
fn is_acceptable(config: &Descriptor, dtype: DType, is_deterministic: bool) -> bool {
    use sys::cudnnBackendNumericalNote_t as Note;
    let Ok(engine) = engine_of(config) else { return false };
    let mut notes = [i32::MAX; 16];
    let Ok(count) =
        engine.get(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Type::CUDNN_TYPE_NUMERICAL_NOTE, &mut notes)
    else {
        return false;
    };
    let has = |note: Note| notes[..count.min(notes.len())].contains(&(note as i32));
    let is_exact = dtype != DType::F32
        || !(has(Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE)
            || has(Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS)
            || has(Note::CUDNN_NUMERICAL_NOTE_WINOGRAD)
            || has(Note::CUDNN_NUMERICAL_NOTE_FFT));
    is_exact
        && !(is_deterministic && has(Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC))
        && !has(Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)
}
