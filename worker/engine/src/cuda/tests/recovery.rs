//! Tests of a rank's state after another rank is lost and the GPU cannot finish the started steps.

#![allow(unsafe_code)] // A stream waits for the host, which simulates a collective that waits for a lost rank.

use super::*;
use crate::{
    StateDict, StepResult,
    cuda::{
        CudaEngine, MicroBatch, PendingStep, Phase,
        command::{Access, Command, StreamId, UPDATING},
        device::{Event, Pinned, Stream},
    },
    prepared_step::PreparedStep,
};
use cudarc::driver::sys;
use lockstep_protocol::spec::OptimizerKind;
use std::time::{Duration, Instant};

const LR: f32 = 0.05;
const STEPS: usize = 5;
/// Number of finished steps before the unfinished step.
const FINISHED: usize = 3;
/// The step that creates the average.
const AVERAGED_FROM: usize = 2;

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Blocks a stream until it is opened.
struct Gate {
    word: Pinned,
    /// Recorded when the stream reaches the gate.
    reached: Event,
}

impl Gate {
    fn close(stream: Stream) -> Self {
        let (word, reached) = (Pinned::new(256).unwrap(), Event::new().unwrap());
        reached.record(stream).unwrap();
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word is mapped, and stays allocated until the stream has passed the gate.
        unsafe { sys::cuStreamWaitValue32_v2(stream.0, word.device, 1, at_least) }.result().unwrap();
        Self { word, reached }
    }

    fn open(&self) {
        self.word.write(0, &[1u32]);
    }
}

/// An engine between the steps of a run.
struct Run {
    engine: CudaEngine,
    batches: Vec<Batch>,
    started: usize,
    results: Vec<StepResult>,
}

impl Run {
    fn new(kind: OptimizerKind, precision: Precision, accumulate: usize) -> Self {
        let network = network(Arch::ResNet20, Stem::Cifar, 16);
        let optimizer = Optimizer { kind, ..config(16).optimizer };
        let config = EngineConfig { optimizer, accumulate, ..config(16) };
        // The default of jobs: the first float16 steps overflow and are skipped.
        let loss_scale = LossScale::Named("dynamic".into());
        let gpu = DeviceConfig { precision, loss_scale, ..deterministic() };
        let batches = (0..STEPS * accumulate).map(|number| pictures(&network, 16, number)).collect();
        let initial = init::initial_parameters(&network, false, 1);
        let engine = super::super::build(network, &initial, config, Arc::new(SingleRank), &gpu).unwrap();
        Self { engine, batches, started: 0, results: Vec::new() }
    }

    fn next_batches(&mut self) -> Vec<Batch> {
        let accumulate = self.engine.config.accumulate;
        self.started += 1;
        self.batches[(self.started - 1) * accumulate..][..accumulate].to_vec()
    }

    fn average(&mut self) {
        if self.started >= AVERAGED_FROM {
            self.engine.update_average(0.75).unwrap();
        }
    }

    /// Starts the next step without waiting for it, as in training.
    fn start(&mut self) {
        let batches = self.next_batches();
        self.results.extend(self.engine.start_step(&batches, LR).unwrap());
        self.average();
    }

    fn start_steps(mut self, steps: usize) -> Self {
        (0..steps).for_each(|_| self.start());
        self
    }

    /// Starts the next step, with a gate before the first command for which `is_gated` is true.
    fn start_up_to(&mut self, is_gated: impl Fn(&Command) -> bool) -> Gate {
        let batches = self.next_batches();
        let engine = &mut self.engine;
        let PreparedStep { parts, gradient_scale } = PreparedStep::of(&batches, &engine.config, 1).unwrap();
        let [part] = parts[..] else { panic!("a step of one micro-batch") };
        let (phase, control) = engine.micro_batch(&part, gradient_scale, LR);
        let input = engine.send_pictures(phase, part.batch).unwrap();
        engine.wait_on_gpu(|program| program.inputs.has_room()).unwrap();
        engine.program.inputs.send(control, part.batch);
        engine.started_steps += 1;
        let commands = engine.program.commands(phase, input, StreamId::Side).unwrap();
        let at = commands.iter().position(is_gated).unwrap();
        engine.program.start(&commands[..at], input.address()).unwrap();
        let gate = Gate::close(engine.program.main_stream.0);
        engine.program.start(&commands[at..], input.address()).unwrap();
        engine.pending_steps.push_back(PendingStep::OnGpu { divisor: None });
        engine.submitted_steps += 1;
        self.average();
        gate
    }

    /// Undoes unfinished steps, as after the loss of another rank. Checks that the state is that of step `finished`, and that the results
    /// of all steps up to it are known.
    fn check_recovered(&mut self, finished: usize, uninterrupted: &[(StateDict, StepResult)]) -> StateDict {
        self.results.extend(self.engine.undo_unfinished_steps().expect("the state on the GPU is known"));
        let without_times =
            |result: &StepResult| StepResult { step_secs: 0.0, all_reduce_secs: 0.0, ..*result };
        let actual: Vec<_> = self.results.iter().map(without_times).collect();
        let expected: Vec<_> =
            uninterrupted[..finished].iter().map(|(_, result)| without_times(result)).collect();
        assert_eq!(format!("{actual:?}"), format!("{expected:?}"));
        let state = self.engine.own_state().unwrap();
        assert!(state == uninterrupted[finished - 1].0, "the state of step {finished}");
        state
    }
}

/// State and result of each step of an uninterrupted run.
fn uninterrupted_run(
    kind: OptimizerKind,
    precision: Precision,
    accumulate: usize,
) -> Vec<(StateDict, StepResult)> {
    let mut run = Run::new(kind, precision, accumulate);
    let step = |_| {
        let batches = run.next_batches();
        let result = run.engine.train_step(&batches, LR).unwrap();
        run.average();
        (run.engine.own_state().unwrap(), result)
    };
    (0..STEPS).map(step).collect()
}

/// Final state of the next attempt, which continues from `state`.
fn continue_run(state: &StateDict, from: usize, mut run: Run) -> StateDict {
    run.engine.load_state_dict(state).unwrap();
    run.started = from;
    run.start_steps(STEPS - from).engine.own_state().unwrap()
}

/// Whether a command announces the update. Before it, and only before it, a step can wait for a lost rank.
fn announces_update(command: &Command) -> bool {
    command.accesses().contains(&(UPDATING, Access::Write))
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_steps_that_wait_for_a_lost_rank_do_not_change_the_state() {
    use OptimizerKind::{AdamW, Lamb, Lars, Momentum};
    for (kind, precision) in [
        (Momentum, Precision::Fp16),
        (Lars, Precision::Fp16),
        (AdamW, Precision::Fp32),
        (Lamb, Precision::Bf16),
    ] {
        let uninterrupted = uninterrupted_run(kind, precision, 1);
        assert!(uninterrupted[FINISHED - 1].0 != uninterrupted[FINISHED].0);
        let mut run = Run::new(kind, precision, 1).start_steps(FINISHED);
        let gate = run.start_up_to(announces_update);
        // Starts another step after the blocked one, as a graph.
        run.start();
        // All earlier steps have finished.
        gate.reached.wait().unwrap();
        let began = Instant::now();
        let state = run.check_recovered(FINISHED, &uninterrupted);
        eprintln!(
            "{kind:?}, {precision:?}: {:.1} ms until recovery from a GPU that waits",
            began.elapsed().as_secs_f64() * 1e3
        );
        // Now no update may begin, even if the GPU continues.
        gate.open();
        run.engine.device.synchronize().unwrap();
        assert!(run.engine.own_state().unwrap() == state, "{kind:?}: the weights have not changed");
        let end = continue_run(&state, FINISHED, Run::new(kind, precision, 1));
        assert!(
            end == uninterrupted[STEPS - 1].0,
            "{kind:?}, {precision:?}: the same bits as if no rank had been lost"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_started_update_is_waited_for() {
    let (kind, precision) = (OptimizerKind::Momentum, Precision::Bf16);
    let uninterrupted = uninterrupted_run(kind, precision, 1);
    let mut run = Run::new(kind, precision, 1).start_steps(FINISHED);
    let updates = |c: &Command| matches!(c, Command::Kernel { kernel, .. } if kernel.name == "sgd_momentum");
    let gate = run.start_up_to(updates);
    run.start();
    gate.reached.wait().unwrap();
    let until = Instant::now() + TIME_LIMIT;
    run.engine.freeze_updates();
    assert!(run.engine.is_updating(until).unwrap(), "the update has not ended, so weights cannot be read");
    gate.open();
    run.check_recovered(FINISHED + 1, &uninterrupted);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_steps_that_begin_after_a_rank_is_lost_and_parts_of_steps_change_nothing() {
    let (kind, precision) = (OptimizerKind::Momentum, Precision::Fp16);
    let uninterrupted = uninterrupted_run(kind, precision, 2);
    let fresh = || {
        let run = Run::new(kind, precision, 2).start_steps(FINISHED);
        // The update of a step that is still under way may be refused.
        run.engine.device.synchronize().unwrap();
        run
    };
    // All started steps have finished.
    let mut run = fresh();
    run.check_recovered(FINISHED, &uninterrupted);
    // Updates are frozen before steps begin.
    let mut run = fresh();
    run.results.extend(run.engine.finish_steps().unwrap());
    run.engine.freeze_updates();
    run.start();
    run.start();
    run.check_recovered(FINISHED, &uninterrupted);
    // The first of two micro-batches has changed running statistics.
    let mut run = fresh();
    let batches = run.next_batches();
    let PreparedStep { parts, gradient_scale } = PreparedStep::of(&batches, &run.engine.config, 1).unwrap();
    let (phase, control) = run.engine.micro_batch(&parts[0], gradient_scale, LR);
    assert!(matches!(phase, Phase::Train(MicroBatch { is_first: true, is_last: false, .. })));
    run.engine.run(phase, control, parts[0].batch).unwrap();
    let state = run.check_recovered(FINISHED, &uninterrupted);
    let end = continue_run(&state, FINISHED, Run::new(kind, precision, 2));
    assert!(end == uninterrupted[STEPS - 1].0, "the same bits as if no rank had been lost");
    // An average that an unfinished step would have created does not exist.
    let mut run = Run::new(kind, precision, 2).start_steps(AVERAGED_FROM - 1);
    run.results.extend(run.engine.finish_steps().unwrap());
    run.engine.freeze_updates();
    run.start();
    assert!(run.engine.has_average());
    assert!(run.check_recovered(AVERAGED_FROM - 1, &uninterrupted).average.is_none());
}
