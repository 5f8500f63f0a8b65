//! Which cuDNN plan runs each convolution: every candidate is timed once, and the choice is kept on
//! disk by shape, type, GPU and cuDNN version. One rank of a machine times them while the others wait for its choices, so the first
//! job of a machine has the bits of every later one.

use super::{
    cache,
    convolution::{Convolution, Direction, Tensors},
    cudnn::{Choice, Cudnn, Plan},
    device::{Buffer, Device, Event, OwnedStream, Ptr},
    error::CudaError,
};
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

/// Most memory that a plan may ask for in addition to its tensors.
const MOST_WORKSPACE: usize = 512 << 20;
/// Bytes of activations that a pass of its own reads in a millisecond: what takes sums along saves that pass.
const PASS_BYTES_A_MILLI: f32 = 3e9;
/// Runs in a captured graph, which is timed.
const RUNS: usize = 4;
/// So many times the best plan's time in a single run: not worth more of them.
const TOO_SLOW: f32 = 3.0;
/// Candidates that come later than this are not tried where one runs: the likely fastest are first, and for convolutions in
/// many groups some of the others take seconds.
const LONG_ENOUGH: Duration = Duration::from_millis(2500);

/// How long the other ranks of a machine may time candidates before this one does so, too: a large network takes them some ten seconds.
const OTHERS_TIME_WITHIN: Duration = Duration::from_secs(60);

/// Plans by convolution.
pub(super) struct Tuner {
    cudnn: Cudnn,
    plans: HashMap<Convolution, Plan>,
    /// None: it is not worth it, or cuDNN has none.
    choices: BTreeMap<String, Option<Choice>>,
    file: String,
    deterministic: bool,
    /// Convolutions that were timed here, with the milliseconds of the best plan.
    pub(super) timed: Vec<(Convolution, f32)>,
}

impl Tuner {
    /// `deterministic`: only plans that give the same bits in every run.
    pub(super) fn new(device: &Device, deterministic: bool) -> Result<Self, CudaError> {
        let gpu: String =
            device.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let any = if deterministic { "" } else { "-any" };
        let file = format!("plans-{gpu}-cudnn{}{any}.json", Cudnn::version());
        Ok(Self {
            cudnn: Cudnn::new()?,
            plans: HashMap::new(),
            choices: choices_in(&file),
            file,
            deterministic,
            timed: Vec::new(),
        })
    }

    pub(super) fn cudnn(&self) -> &Cudnn {
        &self.cudnn
    }

    /// Whether a convolution is run so: with sums, only where that is faster.
    pub(super) fn has(&self, convolution: &Convolution) -> bool {
        self.plans.contains_key(convolution)
    }

    /// The plan for a convolution that [`Tuner::prepare`] was given.
    pub(super) fn plan(&self, convolution: &Convolution) -> Result<&Plan, CudaError> {
        self.plans
            .get(convolution)
            .ok_or_else(|| CudaError::Unsupported(format!("no plan was prepared for {convolution:?}")))
    }

    /// The largest workspace of all plans for weight gradients, or of all others.
    pub(super) fn workspace_bytes(&self, weights: bool) -> usize {
        let of = |c: &Convolution| (c.direction == Direction::Weight) == weights;
        self.plans.iter().filter(|(c, _)| of(c)).map(|(_, p)| p.workspace_bytes).max().unwrap_or(0)
    }

    /// Makes the plans of `wanted` whose choices are known; answers the others.
    fn rebuild(&mut self, wanted: &[Convolution]) -> Vec<Convolution> {
        let mut unknown = Vec::new();
        for convolution in wanted {
            if self.plans.contains_key(convolution) {
                continue;
            }
            let known = self.choices.get(&format!("{convolution:?}"));
            match known.map(|choice| choice.as_ref().map(|choice| self.cudnn.rebuild(convolution, choice))) {
                Some(Some(Ok(plan))) => {
                    self.plans.insert(*convolution, plan);
                }
                Some(None) if convolution.sums => {}
                _ if !unknown.contains(convolution) => unknown.push(*convolution),
                _ => {}
            }
        }
        unknown
    }

    /// Finds a plan for each of `wanted`; times candidates where no earlier choice is known. One rank of a machine does so at a time, and the
    /// others take its choices: two that time the same candidates may choose different ones, and then their sums differ in the last bits.
    pub(super) fn prepare(&mut self, device: &Device, wanted: &[Convolution]) -> Result<(), CudaError> {
        if self.rebuild(wanted).is_empty() {
            return Ok(());
        }
        let _one_at_a_time = cache::lock(&self.file, OTHERS_TIME_WITHIN);
        let before = choices_in(&self.file);
        self.choices.extend(before.clone());
        let mut unknown = self.rebuild(wanted);
        if unknown.is_empty() {
            return Ok(());
        }
        // Plain ones first: those that take sums along are compared with them.
        unknown.sort_by_key(|convolution| convolution.sums);
        let bench = Bench::new(device, &unknown, self.deterministic)?;
        for convolution in unknown {
            let name = format!("{convolution:?}");
            let found = bench.fastest(&self.cudnn, &convolution);
            let found = if convolution.sums {
                let found = found.ok();
                let plain = self.plan(&Convolution { sums: false, ..convolution })?;
                let plain = bench.time(&self.cudnn, &convolution, plain, None)?;
                let worth = plain + convolution.bytes()[2] as f32 / PASS_BYTES_A_MILLI;
                found.filter(|(_, millis)| *millis < worth)
            } else {
                Some(found?)
            };
            self.choices.insert(name, found.as_ref().map(|(plan, _)| plan.choice.clone()));
            if let Some((plan, millis)) = found {
                self.plans.insert(convolution, plan);
                self.timed.push((convolution, millis));
            }
        }
        // Who did not get the lock may have timed the same candidates meanwhile: the choices that have come since stay. Those from before
        // that cannot be rebuilt (another driver) are replaced.
        let mut all = self.choices.clone();
        let is_new = |(name, choice): &(String, Option<Choice>)| before.get(name) != Some(choice);
        all.extend(choices_in(&self.file).into_iter().filter(is_new));
        if let Ok(text) = serde_json::to_vec_pretty(&all) {
            cache::write(&self.file, &text);
        }
        Ok(())
    }
}

/// What was chosen before.
fn choices_in(file: &str) -> BTreeMap<String, Option<Choice>> {
    cache::read(file).and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Bytes of x, w, y and their sums.
fn places(convolution: &Convolution) -> [usize; 4] {
    let [x, w, y] = convolution.bytes();
    [x, w, y, 8 * convolution.out_c]
}

/// Room to try plans in.
struct Bench {
    deterministic: bool,
    tensors: Buffer,
    workspace: Buffer,
    stream: OwnedStream,
    begin: Event,
    end: Event,
}

impl Bench {
    fn new(device: &Device, convolutions: &[Convolution], deterministic: bool) -> Result<Self, CudaError> {
        let bytes =
            convolutions.iter().map(|c| places(c).iter().map(|b| b.next_multiple_of(256)).sum()).max();
        let tensors = device.alloc(bytes.unwrap_or(0))?;
        // Plain numbers in either 16-bit type, different from each other: zeros would run faster.
        let mut state = 1u32;
        let pattern: Vec<u16> = (0..1 << 22)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                0x3800 | (state >> 16) as u16 & 0x83ff
            })
            .collect();
        for offset in (0..tensors.bytes).step_by(pattern.len() * 2) {
            let len = ((tensors.bytes - offset) / 2).min(pattern.len());
            tensors.write_at(offset, &pattern[..len])?;
        }
        Ok(Self {
            deterministic,
            tensors,
            workspace: device.alloc(MOST_WORKSPACE)?,
            stream: OwnedStream::new(false)?,
            begin: Event::new(true)?,
            end: Event::new(true)?,
        })
    }

    /// The fastest plan and its milliseconds.
    fn fastest(&self, cudnn: &Cudnn, convolution: &Convolution) -> Result<(Plan, f32), CudaError> {
        let mut best: Option<(Plan, f32)> = None;
        let mut first_error = None;
        let began = Instant::now();
        // It happens that nothing that heuristics propose runs.
        for fallback in [false, true] {
            if best.is_some() {
                break;
            }
            for plan in cudnn.candidates(convolution, MOST_WORKSPACE, self.deterministic, fallback)? {
                match self.time(cudnn, convolution, &plan, best.as_ref().map(|b| b.1)) {
                    Ok(millis) if best.as_ref().is_none_or(|b| millis < b.1) => best = Some((plan, millis)),
                    Ok(_) => {}
                    Err(error) => first_error = first_error.or(Some(error)),
                }
                if best.is_some() && began.elapsed() > LONG_ENOUGH {
                    break;
                }
            }
        }
        best.ok_or_else(|| match first_error {
            Some(error) => error,
            None => {
                CudaError::Unsupported(format!("cuDNN {} has no plan for {convolution:?}", Cudnn::version()))
            }
        })
    }

    /// Where a convolution's tensors are.
    fn places(&self, convolution: &Convolution) -> Tensors<Ptr> {
        let mut offset = self.tensors.ptr;
        let [x, w, y, sums] = places(convolution).map(|bytes| {
            let at: Ptr = offset;
            offset += bytes.next_multiple_of(256) as u64;
            at
        });
        Tensors { x, w, y, sums }
    }

    /// Milliseconds of a run, from runs one after another in a graph: alone, the host's work would be
    /// longer than a short kernel. A plan that is far slower than the best is not timed twice, and
    /// one that cannot be captured is of no use.
    fn time(
        &self,
        cudnn: &Cudnn,
        convolution: &Convolution,
        plan: &Plan,
        best: Option<f32>,
    ) -> Result<f32, CudaError> {
        let stream = self.stream.0;
        let at = self.places(convolution);
        let run = || cudnn.run(stream, plan, at, self.workspace.ptr);
        // The first run also loads the kernel.
        run()?;
        self.begin.record(stream)?;
        run()?;
        self.end.record(stream)?;
        let once = self.begin.millis_to(&self.end)?;
        if best.is_some_and(|best| once > TOO_SLOW * best + 0.1) {
            return Ok(once);
        }
        stream.begin_capture()?;
        let captured = (0..RUNS).try_for_each(|_| run());
        let graph = stream.end_capture();
        captured?;
        let graph = graph?;
        let mut shortest = f32::INFINITY;
        for _ in 0..2 {
            self.begin.record(stream)?;
            graph.launch(stream)?;
            self.end.record(stream)?;
            shortest = shortest.min(self.begin.millis_to(&self.end)? / RUNS as f32);
            if best.is_some_and(|best| shortest > 1.5 * best) {
                break;
            }
        }
        Ok(shortest)
    }
}
