//! Convolutions by cuDNN's backend interface: an operation graph of one convolution, the engines that
//! can run it, and the fastest of them on this GPU.
//!
//! Follows NVIDIA's cuDNN backend documentation: every descriptor is created, given attributes and
//! finalised; a plan is an engine with its knobs, ready to run.
//!
//! Past 400 lines because all of the backend's interface that we use is behind this one door.

#![allow(unsafe_code)] // The backend's interface is C: attributes are given as pointers to arrays of a stated type.

use super::{
    device::{Ptr, Stream},
    error::CudaError,
    kernels::DType,
};
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnDataType_t, cudnnStatus_t,
};
use serde::{Deserialize, Serialize};
use std::ffi::c_void;

/// Most engine configurations that one heuristic is asked for.
const MOST: usize = 24;

/// What a convolution computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Direction {
    /// y from x and w.
    Forward,
    /// dx from dy and w.
    Input,
    /// dw from x and dy.
    Weight,
}

/// A convolution: shapes, type and direction. Its `Debug` text is its name in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Convolution {
    pub(super) direction: Direction,
    pub(super) dtype: DType,
    /// Pictures.
    pub(super) batch: usize,
    pub(super) in_h: usize,
    pub(super) in_w: usize,
    pub(super) in_c: usize,
    pub(super) out_h: usize,
    pub(super) out_w: usize,
    pub(super) out_c: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    /// Each makes its share of the output's channels from its share of the input's; both are multiples of it.
    pub(super) groups: usize,
    /// Forward only: it takes the sums of y and of y * y by channel along, for the batch norm after it. cuDNN has
    /// that for float16.
    pub(super) sums: bool,
}

impl Convolution {
    /// Bytes of (x, w, y).
    pub(super) fn bytes(&self) -> [usize; 3] {
        let size = self.dtype.size();
        [
            self.batch * self.in_h * self.in_w * self.in_c * size,
            self.out_c * self.kernel * self.kernel * self.group_in_c() * size,
            self.batch * self.out_h * self.out_w * self.out_c * size,
        ]
    }

    /// Input channels that an output is made from.
    fn group_in_c(&self) -> usize {
        self.in_c / self.groups
    }
}

impl std::fmt::Debug for Convolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Convolution");
        text.field("direction", &self.direction).field("dtype", &self.dtype).field("batch", &self.batch);
        text.field("in_h", &self.in_h).field("in_w", &self.in_w).field("in_c", &self.in_c);
        text.field("out_h", &self.out_h).field("out_w", &self.out_w).field("out_c", &self.out_c);
        text.field("kernel", &self.kernel).field("stride", &self.stride).field("padding", &self.padding);
        // Choices that were stored before there were groups stay known.
        if self.groups != 1 {
            text.field("groups", &self.groups);
        }
        text.field("sums", &self.sums).finish()
    }
}

impl std::fmt::Display for Convolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { in_h, in_w, in_c, out_c, kernel, stride, groups, .. } = self;
        let of = match self.direction {
            Direction::Forward => "convolution",
            Direction::Input => "convolution, gradient of input,",
            Direction::Weight => "convolution, gradient of weight,",
        };
        let grouped = if *groups == 1 { String::new() } else { format!(" in {groups} groups") };
        let sums = if self.sums { " with sums" } else { "" };
        write!(f, "{of} {in_h}x{in_w}x{in_c} -> {out_c}, {kernel}x{kernel}/{stride}{grouped}{sums}")
    }
}

/// Where a convolution finds its tensors, NHWC and KRSC (C of w: a group's).
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensors {
    pub(super) x: Ptr,
    pub(super) w: Ptr,
    pub(super) y: Ptr,
    /// Float32 `[2, out_c]`: where [`Convolution::sums`] go.
    pub(super) sums: Ptr,
}

/// An engine and its knobs: all that is needed to build the same plan again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    engine: i64,
    /// (knob, value).
    knobs: Vec<(i64, i64)>,
}

/// Library handles: one for the main stream, and one for weight gradients, which may run beside it; what a
/// handle keeps for itself must not be used by two streams at once.
pub(super) struct Cudnn {
    main: sys::cudnnHandle_t,
    weights: sys::cudnnHandle_t,
}

// SAFETY: a handle belongs to no thread; one at a time uses it, as there is no `Sync`.
unsafe impl Send for Cudnn {}

impl Cudnn {
    pub(super) fn new() -> Result<Self, CudaError> {
        let mut this = Self { main: std::ptr::null_mut(), weights: std::ptr::null_mut() };
        // SAFETY: destroyed when this is dropped.
        check(unsafe { sys::cudnnCreate(&mut this.main) }, || "starting cuDNN".into())?;
        // SAFETY: as above.
        check(unsafe { sys::cudnnCreate(&mut this.weights) }, || "starting cuDNN".into())?;
        Ok(this)
    }

    fn handle(&self, direction: Direction) -> sys::cudnnHandle_t {
        if direction == Direction::Weight { self.weights } else { self.main }
    }

    /// 91900 for 9.19.0.
    pub(super) fn version() -> usize {
        // SAFETY: takes nothing.
        unsafe { sys::cudnnGetVersion() }
    }

    /// Runs `plan` on `stream`.
    pub(super) fn run(
        &self,
        stream: Stream,
        plan: &Plan,
        at: Tensors,
        workspace: Ptr,
    ) -> Result<(), CudaError> {
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        let count = if plan.convolution.sums { 5 } else { 3 };
        let squares = at.sums + 4 * plan.convolution.out_c as u64;
        let pointers = [at.x, at.w, at.y, at.sums, squares].map(|p| p as *mut c_void);
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
            check(sys::cudnnBackendExecute(handle, plan.plan.0, pack.0), || "a convolution".into())
        }
    }

    /// Plans for `convolution`, the likely fastest first, each built when it is asked for (which may compile a kernel); if
    /// `deterministic`, those that cuDNN says give the same bits in every run. `fallback`: of engines that run anything,
    /// so slowly that timing them takes minutes.
    pub(super) fn candidates(
        &self,
        convolution: &Convolution,
        most_workspace: usize,
        deterministic: bool,
        fallback: bool,
    ) -> Result<impl Iterator<Item = Plan>, CudaError> {
        let graph = self.graph(convolution)?;
        let mut found: Vec<(Descriptor, Choice)> = Vec::new();
        use sys::cudnnBackendHeurMode_t as Mode;
        let modes: &[Mode] = match fallback {
            false => &[Mode::CUDNN_HEUR_MODE_A, Mode::CUDNN_HEUR_MODE_B],
            true => &[Mode::CUDNN_HEUR_MODE_FALLBACK],
        };
        for &mode in modes {
            let Ok(configs) = configurations(&graph, mode) else { continue };
            for config in configs {
                let Ok(choice) = choice_of(&config) else { continue };
                if !found.iter().any(|(_, known)| *known == choice)
                    && suits(&config, convolution.dtype, deterministic)
                {
                    found.push((config, choice));
                }
            }
        }
        let convolution = *convolution;
        let built = move |(config, choice)| self.plan(&convolution, config, choice).ok();
        Ok(found.into_iter().filter_map(built).filter(move |plan| plan.workspace_bytes <= most_workspace))
    }

    /// The plan of an earlier choice.
    pub(super) fn rebuild(&self, convolution: &Convolution, choice: &Choice) -> Result<Plan, CudaError> {
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
        self.plan(convolution, config, choice.clone())
    }

    fn plan(&self, convolution: &Convolution, config: Descriptor, choice: Choice) -> Result<Plan, CudaError> {
        let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        let handle = self.handle(convolution.direction);
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?;
        plan.set_descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[&config])?;
        plan.finalize("a plan")?;
        let mut bytes = [0i64];
        plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, Type::CUDNN_TYPE_INT64, &mut bytes)?;
        Ok(Plan { plan, convolution: *convolution, workspace_bytes: bytes[0].max(0) as usize, choice })
    }

    /// The operation graph of one convolution. cuDNN takes the number of groups from the channels of x and w.
    fn graph(&self, c: &Convolution) -> Result<Descriptor, CudaError> {
        let x = tensor(X, [c.batch, c.in_c, c.in_h, c.in_w], c.dtype)?;
        let w = tensor(W, [c.out_c, c.group_in_c(), c.kernel, c.kernel], c.dtype)?;
        let y = tensor(Y, [c.batch, c.out_c, c.out_h, c.out_w], c.dtype)?;
        let convolution = Descriptor::new(Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
        let float = [cudnnDataType_t::CUDNN_DATA_FLOAT];
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Type::CUDNN_TYPE_DATA_TYPE, &float)?;
        let mode = [sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION];
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Type::CUDNN_TYPE_CONVOLUTION_MODE, &mode)?;
        convolution.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, Type::CUDNN_TYPE_INT64, &[2i64])?;
        for (name, value) in [
            (Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, 1),
            (Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, c.stride),
            (Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, c.padding),
            (Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, c.padding),
        ] {
            convolution.set(name, Type::CUDNN_TYPE_INT64, &[value as i64; 2])?;
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
        operation.set(names[4], Type::CUDNN_TYPE_FLOAT, &[1f32])?;
        operation.set(names[5], Type::CUDNN_TYPE_FLOAT, &[0f32])?;
        operation.finalize("an operation")?;
        let sums = if c.sums { Some(sums_of(&y, c.out_c)?) } else { None };
        let operations: Vec<&Descriptor> = std::iter::once(&operation).chain(sums.as_ref()).collect();

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
        for handle in [self.main, self.weights] {
            if !handle.is_null() {
                // SAFETY: created by `new`.
                let _ = unsafe { sys::cudnnDestroy(handle) };
            }
        }
    }
}

/// A way to run one convolution.
pub(super) struct Plan {
    plan: Descriptor,
    convolution: Convolution,
    pub(super) workspace_bytes: usize,
    pub(super) choice: Choice,
}

// Tensor numbers in a graph; those of `names` above, in order.
const X: i64 = 1;
const W: i64 = 2;
const Y: i64 = 3;
// Of its statistics.
const SUM: i64 = 4;
const SQUARE: i64 = 5;

/// The operation that sums `y` and its squares by channel.
fn sums_of(y: &Descriptor, channels: usize) -> Result<Descriptor, CudaError> {
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

/// NHWC (or KRSC), its dimensions named N, C, H, W as the backend wants them.
fn tensor(id: i64, [n, c, h, w]: [usize; 4], dtype: DType) -> Result<Descriptor, CudaError> {
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

/// What a heuristic proposes.
fn configurations(
    graph: &Descriptor,
    mode: sys::cudnnBackendHeurMode_t,
) -> Result<Vec<Descriptor>, CudaError> {
    let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    heuristic.set_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?;
    heuristic.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, &[mode])?;
    heuristic.finalize("a heuristic")?;
    let configs = (0..MOST)
        .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
        .collect::<Result<Vec<_>, _>>()?;
    let mut handles: Vec<_> = configs.iter().map(|c| c.0).collect();
    let found = heuristic.get(
        Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
        Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
        &mut handles,
    )?;
    Ok(configs.into_iter().take(found).collect())
}

/// The engine of a configuration.
fn engine_of(config: &Descriptor) -> Result<Descriptor, CudaError> {
    let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
    let mut handles = [engine.0];
    config.get(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut handles)?;
    Ok(engine)
}

fn choice_of(config: &Descriptor) -> Result<Choice, CudaError> {
    let mut index = [0i64];
    engine_of(config)?.get(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, Type::CUDNN_TYPE_INT64, &mut index)?;
    let choices = (0..32)
        .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR))
        .collect::<Result<Vec<_>, _>>()?;
    let mut handles: Vec<_> = choices.iter().map(|c| c.0).collect();
    let found = config
        .get(Name::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut handles)
        .unwrap_or(0);
    let mut knobs = Vec::new();
    for choice in choices.iter().take(found) {
        let (mut knob, mut value) = ([0i32], [0i64]);
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, Type::CUDNN_TYPE_KNOB_TYPE, &mut knob)?;
        choice.get(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, Type::CUDNN_TYPE_INT64, &mut value)?;
        knobs.push((i64::from(knob[0]), value[0]));
    }
    Ok(Choice { engine: index[0], knobs })
}

/// Whether an engine keeps what is promised: the same bits in every run if `deterministic`, sums in float32, and
/// with float32 tensors no tensor cores, which would round their inputs to 10 bits (TF32).
fn suits(config: &Descriptor, dtype: DType, deterministic: bool) -> bool {
    use sys::cudnnBackendNumericalNote_t as Note;
    let Ok(engine) = engine_of(config) else { return false };
    let mut notes = [i32::MAX; 16];
    let Ok(found) =
        engine.get(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Type::CUDNN_TYPE_NUMERICAL_NOTE, &mut notes)
    else {
        return false;
    };
    let has = |note: Note| notes[..found.min(notes.len())].contains(&(note as i32));
    let exact = dtype != DType::F32
        || !(has(Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE)
            || has(Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS)
            || has(Note::CUDNN_NUMERICAL_NOTE_WINOGRAD)
            || has(Note::CUDNN_NUMERICAL_NOTE_FFT));
    exact
        && !(deterministic && has(Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC))
        && !has(Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)
}

/// One object of the backend.
struct Descriptor(sys::cudnnBackendDescriptor_t);

// SAFETY: a descriptor belongs to no thread; one at a time uses it, as there is no `Sync`.
unsafe impl Send for Descriptor {}

impl Descriptor {
    fn new(kind: Kind) -> Result<Self, CudaError> {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: destroyed when this is dropped.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut descriptor) }, || {
            format!("creating a {kind:?}")
        })?;
        Ok(Self(descriptor))
    }

    /// Gives an attribute; the backend copies the values.
    fn set<T>(&self, name: Name, kind: Type, values: &[T]) -> Result<(), CudaError> {
        // SAFETY: as many values as said, of the type that the attribute has.
        let status = unsafe {
            sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast())
        };
        check(status, || format!("setting {name:?}"))
    }

    fn set_descriptors(&self, name: Name, values: &[&Descriptor]) -> Result<(), CudaError> {
        let handles: Vec<_> = values.iter().map(|d| d.0).collect();
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &handles)
    }

    /// Asks for an attribute; gives how many values there are (and writes as many as fit).
    fn get<T>(&self, name: Name, kind: Type, values: &mut [T]) -> Result<usize, CudaError> {
        let mut found = 0i64;
        // SAFETY: room for as many values as said, of the type that the attribute has.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.0,
                name,
                kind,
                values.len() as i64,
                &mut found,
                values.as_mut_ptr().cast(),
            )
        };
        check(status, || format!("asking for {name:?}"))?;
        Ok((found.max(0) as usize).min(values.len()))
    }

    fn finalize(&self, what: &str) -> Result<(), CudaError> {
        // SAFETY: the descriptor is alive.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, || format!("preparing {what}"))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

fn check(status: cudnnStatus_t, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut text = [0u8; 512];
    // SAFETY: room for as many bytes as said; the library ends them with a zero.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr().cast(), text.len()) };
    let text = String::from_utf8_lossy(text.split(|b| *b == 0).next().unwrap_or_default()).trim().to_owned();
    let detail = if text.is_empty() { text } else { format!(": {text}") };
    Err(CudaError::cudnn(doing(), status, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Convolution = Convolution {
        direction: Direction::Forward,
        dtype: DType::F16,
        batch: 32,
        in_h: 56,
        in_w: 56,
        in_c: 128,
        out_h: 28,
        out_w: 28,
        out_c: 256,
        kernel: 3,
        stride: 2,
        padding: 1,
        groups: 1,
        sums: false,
    };

    /// A plan is for as many groups as it was found with, and one that was stored before there were groups stays known.
    #[test]
    fn plans_are_stored_by_everything_that_tells_convolutions_apart() {
        let name = |c: &Convolution| format!("{c:?}");
        assert_eq!(
            name(&PLAIN),
            "Convolution { direction: Forward, dtype: F16, batch: 32, in_h: 56, in_w: 56, in_c: 128, out_h: 28, \
             out_w: 28, out_c: 256, kernel: 3, stride: 2, padding: 1, sums: false }"
        );
        let all = [
            PLAIN,
            Convolution { direction: Direction::Input, ..PLAIN },
            Convolution { dtype: DType::Bf16, ..PLAIN },
            Convolution { batch: 33, ..PLAIN },
            Convolution { in_h: 55, ..PLAIN },
            Convolution { in_w: 55, ..PLAIN },
            Convolution { in_c: 256, ..PLAIN },
            Convolution { out_h: 27, ..PLAIN },
            Convolution { out_w: 27, ..PLAIN },
            Convolution { out_c: 128, ..PLAIN },
            Convolution { kernel: 5, ..PLAIN },
            Convolution { stride: 1, ..PLAIN },
            Convolution { padding: 0, ..PLAIN },
            Convolution { groups: 32, ..PLAIN },
            Convolution { groups: 64, ..PLAIN },
            Convolution { sums: true, ..PLAIN },
        ];
        let names: std::collections::BTreeSet<String> = all.iter().map(name).collect();
        assert_eq!(names.len(), all.len(), "{names:?}");
    }

    #[test]
    fn a_grouped_weight_has_a_group_s_share_of_the_inputs() {
        let grouped = Convolution { groups: 32, ..PLAIN };
        let ([x, w, y], plain) = (grouped.bytes(), PLAIN.bytes());
        assert_eq!((x, 32 * w, y), (plain[0], plain[1], plain[2]));
        assert_eq!(w, 256 * 9 * 4 * 2);
        assert_eq!(grouped.to_string(), "convolution 56x56x128 -> 256, 3x3/2 in 32 groups");
    }
}
