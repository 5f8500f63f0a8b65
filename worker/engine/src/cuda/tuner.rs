//! Chooses cuDNN's plan for each convolution: all candidates are timed once, and the choice is cached on disk by shape, type, GPU and cuDNN
//! version. One rank of a machine times the candidates and the others use its choices, so all jobs of a machine compute the same bits.

use super::{
    convolution::{Convolution, Direction, Tensors},
    cudnn::{Choice, Cudnn, FALLBACK_ENGINES, FAST_ENGINES, Plan},
    device::{Buffer, Device, Event, OwnedStream, Ptr},
    error::{CudaError, Result},
};
use lockstep_host::cache;
use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

/// Choices for common networks, so that a machine's first job with one of them starts without timing candidates. Each file is the cache
/// file after `lockstep bench` with an empty cache, for the cases resnet18, resnet34 and resnet50 at 224 pixels with batches of 32, 64, 128
/// and 256, resnet101 with 32, 64 and 128, resnet50:32:32, resnet20:32:128, and resnet18c:32 with 128, 256, 512 and 1024.
const MEASURED: [(&str, &str); 1] =
    [("plans-NVIDIA-H200-cudnn91400-any.json", include_str!("tuner/plans-NVIDIA-H200-cudnn91400-any.json"))];

/// Maximum workspace of a plan, in bytes.
const MAX_WORKSPACE_BYTES: usize = 512 << 20;
/// Bytes of activations that a separate pass for the sums reads per millisecond (3 TB/s). A convolution that computes sums saves this pass.
const PASS_BYTES_PER_MS: f32 = 3e9;
/// Number of runs in the captured graph that is timed.
const RUNS: usize = 4;
/// A plan whose first run takes more than this many times the best plan's time is not timed further.
const TOO_SLOW_FACTOR: f32 = 3.0;
/// Time after which no further candidates for a convolution are tried, if a plan has been found. The likely fastest candidates come first.
/// For convolutions with many groups, some later candidates take seconds.
const MAX_SEARCH_TIME: Duration = Duration::from_millis(2500);

/// Maximum wait for another rank of this machine that times candidates, which takes about ten seconds for a large network.
const MAX_TIMING_WAIT: Duration = Duration::from_secs(60);

pub(super) struct Tuner {
    pub(super) cudnn: Cudnn,
    plans: HashMap<Convolution, Plan>,
    /// By the `Debug` text of a convolution. `None` for a convolution with sums for which cuDNN has no plan that is faster than a separate
    /// pass for the sums.
    choices: BTreeMap<String, Option<Choice>>,
    file: String,
    /// Whether plans must give the same bits in every run.
    pub(super) is_deterministic: bool,
}

impl Tuner {
    pub(super) fn new(device: &Device, cudnn: Cudnn, is_deterministic: bool) -> Self {
        let gpu: String =
            device.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let suffix = if is_deterministic { "" } else { "-any" };
        let file = format!("plans-{gpu}-cudnn{}{suffix}.json", Cudnn::version());
        Self { cudnn, plans: HashMap::new(), choices: choices_in(&file), file, is_deterministic }
    }

    /// Whether a convolution has a plan. A convolution with sums has a plan only if the plan is faster than a separate pass for the sums.
    pub(super) fn has_plan(&self, convolution: &Convolution) -> bool {
        self.plans.contains_key(convolution)
    }

    /// The plan of a convolution that was passed to [`Tuner::prepare`].
    pub(super) fn plan(&self, convolution: &Convolution) -> Result<&Plan> {
        self.plans
            .get(convolution)
            .ok_or_else(|| CudaError::Unsupported(format!("no plan was prepared for {convolution:?}")))
    }

    /// The largest workspace in bytes of all plans for weight gradients, then of all other plans.
    pub(super) fn workspace_bytes(&self) -> [usize; 2] {
        let (weights, others): (Vec<_>, Vec<_>) =
            self.plans.iter().partition(|(convolution, _)| convolution.direction == Direction::Weight);
        [weights, others].map(|all| all.iter().map(|(_, plan)| plan.workspace_bytes).max().unwrap_or(0))
    }

    /// Builds the plans of `convolutions` whose choices are cached. Returns the other convolutions.
    fn rebuild(&mut self, convolutions: &[Convolution]) -> Vec<Convolution> {
        let mut unknown = Vec::new();
        for convolution in convolutions {
            if self.plans.contains_key(convolution) {
                continue;
            }
            let choice = self.choices.get(&format!("{convolution:?}"));
            if choice == Some(&None) && convolution.sums {
                continue;
            }
            if let Some(Some(choice)) = choice
                && let Ok(plan) = self.cudnn.rebuild(convolution, choice)
            {
                self.plans.insert(*convolution, plan);
            } else if !unknown.contains(convolution) {
                unknown.push(*convolution);
            }
        }
        unknown
    }

    /// Finds a plan for each of `convolutions`, and times candidates if no choice is cached. Only one rank of a machine times candidates,
    /// and the other ranks use its choices, because ranks with different plans would compute different last bits.
    pub(super) fn prepare(&mut self, device: &Device, convolutions: &[Convolution]) -> Result {
        if self.rebuild(convolutions).is_empty() {
            return Ok(());
        }
        let _one_at_a_time = cache::lock(cache::dir(), &self.file, MAX_TIMING_WAIT);
        let earlier = choices_in(&self.file);
        self.choices.extend(earlier.clone());
        let mut unknown = self.rebuild(convolutions);
        if unknown.is_empty() {
            return Ok(());
        }
        // A convolution with sums is compared with the same convolution without sums, which comes first.
        unknown.sort_by_key(|convolution| convolution.sums);
        let bench = Bench::new(device, &unknown, self.is_deterministic)?;
        for convolution in unknown {
            let key = format!("{convolution:?}");
            let fastest = bench.fastest(&self.cudnn, &convolution);
            let chosen = if convolution.sums {
                let fastest = fastest.ok();
                let plain = self.plan(&Convolution { sums: false, ..convolution })?;
                let plain_millis = bench.time(&self.cudnn, &convolution, plain, None)?;
                let separate_millis = plain_millis + convolution.bytes()[2] as f32 / PASS_BYTES_PER_MS;
                fastest.filter(|(_, millis)| *millis < separate_millis)
            } else {
                Some(fastest?)
            };
            self.choices.insert(key, chosen.as_ref().map(|(plan, _)| plan.choice.clone()));
            if let Some((plan, _)) = chosen {
                self.plans.insert(convolution, plan);
            }
        }
        // The wait for the lock is limited, so another rank may have timed the same candidates meanwhile. Its choices are kept. Earlier
        // choices whose plans could not be built, after a change of the driver, are replaced.
        let mut all = self.choices.clone();
        let is_new = |(key, choice): &(String, Option<Choice>)| earlier.get(key) != Some(choice);
        all.extend(choices_in(&self.file).into_iter().filter(is_new));
        if let Ok(json) = serde_json::to_vec_pretty(&all) {
            cache::write(&self.file, &json);
        }
        Ok(())
    }
}

/// The choices in the cache, and the choices in [`MEASURED`] that the cache does not contain.
fn choices_in(file: &str) -> BTreeMap<String, Option<Choice>> {
    let parse = |json: &[u8]| serde_json::from_slice(json).ok();
    let measured =
        MEASURED.iter().find(|(name, _)| *name == file).and_then(|(_, text)| parse(text.as_bytes()));
    let mut choices: BTreeMap<_, _> = measured.unwrap_or_default();
    choices.extend(cache::read(file).and_then(|text| parse(&text)).unwrap_or_default());
    choices
}

/// Sizes in bytes of x, w, y and the sums.
fn tensor_bytes(convolution: &Convolution) -> [usize; 4] {
    let [x, w, y] = convolution.bytes();
    [x, w, y, 8 * convolution.out_c]
}

/// Memory in which plans are timed.
struct Bench {
    is_deterministic: bool,
    tensors: Buffer,
    workspace: Buffer,
    stream: OwnedStream,
    begin: Event,
    end: Event,
}

impl Bench {
    fn new(device: &Device, convolutions: &[Convolution], is_deterministic: bool) -> Result<Self> {
        let bytes =
            convolutions.iter().map(|c| tensor_bytes(c).iter().map(|b| b.next_multiple_of(256)).sum()).max();
        let tensors = device.alloc(bytes.unwrap_or(0))?;
        // The bits are different finite numbers in either 16-bit type. Zeros would run faster.
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
            is_deterministic,
            tensors,
            workspace: device.alloc(MAX_WORKSPACE_BYTES)?,
            stream: OwnedStream::new()?,
            begin: Event::timed()?,
            end: Event::timed()?,
        })
    }

    /// The fastest plan and its time in milliseconds.
    fn fastest(&self, cudnn: &Cudnn, convolution: &Convolution) -> Result<(Plan, f32)> {
        let mut best: Option<(Plan, f32)> = None;
        let mut first_error = None;
        let began = Instant::now();
        // Sometimes none of the fast engines can run a convolution.
        for heuristics in [FAST_ENGINES, FALLBACK_ENGINES] {
            if best.is_some() {
                break;
            }
            for plan in
                cudnn.candidates(convolution, MAX_WORKSPACE_BYTES, self.is_deterministic, heuristics)?
            {
                match self.time(cudnn, convolution, &plan, best.as_ref().map(|b| b.1)) {
                    Ok(millis) if best.as_ref().is_none_or(|b| millis < b.1) => best = Some((plan, millis)),
                    Ok(_) => {}
                    Err(error) => first_error = first_error.or(Some(error)),
                }
                if best.is_some() && began.elapsed() > MAX_SEARCH_TIME {
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

    fn addresses(&self, convolution: &Convolution) -> Tensors<Ptr> {
        let mut offset = self.tensors.ptr;
        let [x, w, y, channel_sums] = tensor_bytes(convolution).map(|bytes| {
            let at: Ptr = offset;
            offset += bytes.next_multiple_of(256) as u64;
            at
        });
        Tensors { x, w, y, channel_sums }
    }

    /// Milliseconds per run, measured over consecutive runs in a graph, because the host's launch overhead is longer than a short kernel.
    /// `best` is the time in milliseconds of the best plan so far, if there is one. A plan that is much slower is not timed in a graph.
    /// Fails for a plan that cannot be captured.
    fn time(&self, cudnn: &Cudnn, convolution: &Convolution, plan: &Plan, best: Option<f32>) -> Result<f32> {
        let stream = self.stream.0;
        let tensors = self.addresses(convolution);
        let run = || cudnn.run(stream, plan, tensors, self.workspace.ptr);
        // The first run also loads the kernel.
        run()?;
        self.begin.record(stream)?;
        run()?;
        self.end.record(stream)?;
        let once = self.begin.millis_to(&self.end)?;
        // A single run also includes the host's launch overhead: 0.1 ms.
        if best.is_some_and(|best| once > TOO_SLOW_FACTOR * best + 0.1) {
            return Ok(once);
        }
        stream.begin_capture()?;
        // A capture that has begun must end, also after an error.
        let launched = (0..RUNS).try_for_each(|_| run());
        let graph = stream.end_capture();
        launched?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys contain the names of the fields of `Convolution`.
    #[test]
    fn measured_choices_are_found_by_their_keys() {
        let convolution = Convolution {
            direction: Direction::Weight,
            in_h: 14,
            in_w: 14,
            in_c: 256,
            out_h: 14,
            out_w: 14,
            out_c: 256,
            ..Convolution::EXAMPLE
        };
        for (file, _) in MEASURED {
            assert!(choices_in(file).contains_key(&format!("{convolution:?}")), "{file}");
        }
    }
}
