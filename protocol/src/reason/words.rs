//! Makes the English sentences of all reasons.

use super::{Facts, ReasonCode, SLOTS_ON};
use crate::spec::DeviceKind;

/// The sentence for a code and its facts.
pub(super) fn words(code: &ReasonCode, facts: &Facts) -> String {
    use ReasonCode::*;
    let Facts { rank, step, attempt, signal, exit_status, secs, .. } = facts;
    let (rank, step, attempt) = (rank.unwrap_or(0), step.unwrap_or(0), attempt.unwrap_or(0));
    let secs = secs.unwrap_or(0.0);
    let detail = facts.detail.as_deref().unwrap_or_default();
    let more = |between: &str| facts.detail.as_ref().map_or(String::new(), |d| format!("{between}{d}"));
    let agent = format!("agent {:?}", facts.agent.as_deref().unwrap_or_default());
    // The step that the server has last heard of.
    let at_step = facts.step.filter(|s| *s > 0).map_or(String::new(), |step| format!(" at step {step}"));
    match code {
        RankKilled => format!("rank {rank} was killed by signal {} at step {step}", signal.unwrap_or(0)),
        RankExited => {
            let status = exit_status.unwrap_or(0);
            format!("rank {rank} ended with exit status {status} at step {step}{}", more(": "))
        }
        RankStopped => {
            format!("rank {rank} was stopped at step {step}, and not by its agent")
        }
        RankVanished => format!("rank {rank} ended at step {step} while its agent was not running"),
        Stalled if facts.secs.is_some() => {
            format!("rank {rank} made no progress for {secs} s at step {step}{}", more("; "))
        }
        OutOfMemory if signal.is_some() => format!(
            "killed: out of memory ({detail}). Lower train.batch_size or parallel.ranks, or use a machine with more \
             memory"
        ),
        NotStarted | DatasetUnusable | DiskFull | SharedMemoryTooSmall if facts.rank.is_none() => {
            format!("the ranks were not started: {detail}")
        }
        Unkillable => format!(
            "{detail} has not ended after SIGKILL: it holds its memory until {} is restarted",
            facts.agent.as_deref().unwrap_or("its machine")
        ),
        ServerSilent => format!("the server was silent for {secs} s, so its agent ended the ranks"),
        SpoolFull => {
            let size = facts.size_bytes.unwrap_or(0) as f64 / 1e6;
            format!("the spool of {agent} is full: {size:.0} MB of records wait for the server (--spool-mib)")
        }
        PrecisionFallback => {
            format!("float16 could not hold {detail}: training continues in bfloat16 after step {step}")
        }
        AgentRestarted => {
            format!("{agent} was restarted before it had started the ranks{}", more(": "))
        }
        Unexplained => "the ranks ended, and none of them reported why".into(),
        CancelledByUser => format!("cancelled on request{}", more("; ")),
        Cancelling => "being cancelled: its ranks are stopping".into(),
        PausedByUser => match &facts.detail {
            Some(why) => format!("paused on request ({why})"),
            None => "paused on request".into(),
        },
        Pausing => "being paused: its ranks finish their step and write a checkpoint".into(),
        Preempting => format!(
            "being preempted by {}: its ranks finish their step and write a checkpoint",
            facts.other_job()
        ),
        Preempted => match &facts.detail {
            Some(why) => format!("preempted by {} ({why})", facts.other_job()),
            None => format!("preempted by {}", facts.other_job()),
        },
        ResumedByUser => "resumed on request".into(),
        PausedBySweep => format!("paused at a rung of its sweep, after epoch {detail}"),
        ResumedBySweep => "resumed by its sweep: it is among the best at its rung".into(),
        EndedBySweep => {
            "ended by its sweep: other trials are better at its rung. It keeps its checkpoint; `lockstep retry` trains it on".into()
        }
        RetriedByUser => "retried on request".into(),
        Forked => {
            let Some(id) = facts.job.as_deref() else {
                return format!("forked from a private job at step {step}");
            };
            let name = if detail.is_empty() { String::new() } else { format!("{detail:?} ") };
            format!("forked from {name}({id}) at step {step}")
        }
        AgentLost => format!("{agent} was silent for {secs} s{at_step}{}", more("; ")),
        AgentWithoutRanks => format!("{agent} has no ranks of attempt {attempt}{at_step}"),
        StartLost => format!("the order to start attempt {attempt} did not reach {agent}"),
        AgentStopped if detail.is_empty() => "its agent was shut down".into(),
        AgentStopped => format!("{agent} was shut down ({detail})"),
        AgentDeclined => format!("{agent} did not start the job: {detail}"),
        AgentLeft => format!("{agent} disconnected before it could start the ranks"),
        DatasetMissing => {
            let name = facts.dataset.as_deref().unwrap_or_default();
            format!("dataset {name:?} is no longer registered; add it again and retry the job")
        }
        CheckpointMissing => {
            let id = facts.checkpoint.as_deref().unwrap_or_default();
            format!(
                "model.pretrained: checkpoint {id:?} no longer exists; name another one and submit the job again"
            )
        }
        UnreadableSpec => format!(
            "another version of lockstep stored this job, and this version cannot start it ({detail}); run that version, \
             or submit the job again"
        ),
        NoAgentOnline => "no agent is online; start one with `lockstep agent --server URL`".into(),
        NoAgentAccepts if detail.is_empty() => "no online agent takes this job".into(),
        NoAgentAccepts => format!("no online agent takes this job; {}", undrain(detail)),
        TooFewSlots if facts.slots_total.unwrap_or(0) == 0 => {
            let which = if detail.is_empty() { "online machine has" } else { "machine that takes work has" };
            format!("needs {}, and no {which} any{}", facts.slots(facts.slots_needed), more("; "))
        }
        TooFewSlots if facts.machines.is_some() => format!(
            "needs {}; {} online machines have {} in all, {} of them free{}{}",
            facts.slots(facts.slots_needed),
            facts.machines.unwrap_or(0),
            facts.slots_total.unwrap_or(0),
            facts.slots_free.unwrap_or(0),
            facts.by_machine(),
            more("; ")
        ),
        MachinesApart => format!(
            "needs {}; the online machines have enough together, but others cannot reach {detail}: start {} with --advertise ADDRESS",
            facts.slots(facts.slots_needed),
            if detail.contains(", ") { "these agents" } else { "that agent" }
        ),
        WaitingForCheckpoint if facts.agent.is_none() => {
            let id = facts.checkpoint.as_deref().unwrap_or_default();
            format!("waits for checkpoint {id} from the object store{}", more("; the last try failed: "))
        }
        WaitingForCheckpoint => {
            let id = facts.checkpoint.as_deref().unwrap_or_default();
            format!("waits until {agent} has uploaded checkpoint {id}")
        }
        WaitingForSlots if facts.machines.is_some() => format!(
            "waits for {}: {} of {} on {} machines free{}{}{}",
            facts.slots(facts.slots_needed),
            facts.slots_free.unwrap_or(0),
            facts.slots_total.unwrap_or(0),
            facts.machines.unwrap_or(0),
            facts.kept(),
            facts.by_machine(),
            more("; ")
        ),
        TooFewSlots => format!(
            "needs {}; the largest online machine, {:?}, has {}{}{}",
            facts.slots(facts.slots_needed),
            facts.agent.as_deref().unwrap_or_default(),
            facts.slots_total.unwrap_or(0),
            facts.by_machine(),
            more("; ")
        ),
        WaitingForSlots => format!(
            "waits for {}: {} of {} on {:?} free{}{}{}",
            facts.slots(facts.slots_needed),
            facts.slots_free.unwrap_or(0),
            facts.slots_total.unwrap_or(0),
            facts.agent.as_deref().unwrap_or_default(),
            facts.kept(),
            facts.by_machine(),
            more("; ")
        ),
        FewerRanks => format!(
            "trains with {} of {} ranks, because for {secs} s there were not enough free slots for all{}",
            facts.ranks.unwrap_or(0),
            facts.slots_needed.unwrap_or(0),
            more("; the last attempt: ")
        ),
        RunSilent => {
            format!("its program has sent nothing for {secs} s; the run continues when it sends again")
        }
        // A rank's own words.
        _ if facts.rank.is_some() => format!("rank {rank} failed at step {step}: {detail}"),
        _ if facts.detail.is_some() => detail.to_owned(),
        other => other.as_str().replace('_', " "),
    }
}

/// How to give work to drained machines.
pub fn undrain(names: &str) -> String {
    format!("drained: {names} (`lockstep machine undrain` or the page Machines gives them work again)")
}

impl Facts {
    fn other_job(&self) -> String {
        let priority = self.priority.unwrap_or(0);
        match &self.job {
            Some(job) => format!("job {job} of priority {priority}"),
            // The other job is private.
            None => format!("a job of priority {priority}"),
        }
    }

    /// The jobs for which free slots are kept, in words.
    fn kept(&self) -> String {
        let name = |name: &String| match name.as_str() {
            "" => "another job".to_owned(),
            name => format!("{name:?}"),
        };
        let names = match self.kept_for.as_slice() {
            [] => return String::new(),
            [one] => name(one),
            [one, other] => format!("{} and {}", name(one), name(other)),
            [one, others @ ..] => format!("{} and {} other jobs", name(one), others.len()),
        };
        match self.slots_kept {
            Some(kept) if Some(kept) != self.slots_free => format!(", {kept} of them kept for {names}"),
            _ => format!(", kept for {names}"),
        }
    }

    /// `; free on each machine: 1 of 2 on "a", 0 of 4 on "b"`.
    fn by_machine(&self) -> String {
        if self.slots_on.is_empty() {
            return String::new();
        }
        let named = self.slots_on.iter().take(SLOTS_ON);
        let named: Vec<_> =
            named.map(|on| format!("{} of {} on {:?}", on.free, on.total, on.agent)).collect();
        let others = if self.slots_on.len() > SLOTS_ON { ", and others" } else { "" };
        format!("; free on each machine: {}{others}", named.join(", "))
    }

    fn slots(&self, number: Option<u32>) -> String {
        let kind = self.device.as_deref().and_then(DeviceKind::named);
        let unit = kind.map_or("slot", |kind| kind.slot_name);
        match number.unwrap_or(0) {
            1 => format!("1 {unit}"),
            n => format!("{n} {unit}s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::AgentSlots, *};

    #[test]
    fn free_slots_that_are_kept_say_for_whom() {
        let waits = |slots_kept: u32, names: &[&str]| {
            let facts = Facts {
                slots_needed: Some(2),
                slots_free: Some(2),
                slots_total: Some(4),
                agent: Some("a".into()),
                slots_kept: Some(slots_kept),
                kept_for: names.iter().map(|name| (*name).to_owned()).collect(),
                ..Facts::default()
            };
            words(&ReasonCode::WaitingForSlots, &facts)
        };
        let free = "waits for 2 slots: 2 of 4 on \"a\" free";
        assert_eq!(waits(0, &[]), free);
        assert_eq!(waits(2, &["large"]), format!("{free}, kept for \"large\""));
        assert_eq!(waits(1, &["large"]), format!("{free}, 1 of them kept for \"large\""));
        assert_eq!(waits(2, &["", "b"]), format!("{free}, kept for another job and \"b\""));
        assert_eq!(waits(2, &["a", "b", ""]), format!("{free}, kept for \"a\" and 2 other jobs"));
    }

    #[test]
    fn a_wait_names_every_machine_that_takes_the_job() {
        let on = |agent: &str, free, total| AgentSlots { agent: agent.into(), free, total };
        let facts = Facts {
            slots_needed: Some(4),
            slots_free: Some(1),
            slots_total: Some(4),
            machines: Some(2),
            slots_on: vec![on("a", 1, 2), on("b", 0, 2)],
            ..Facts::default()
        };
        let machines = "; free on each machine: 1 of 2 on \"a\", 0 of 2 on \"b\"";
        let one = Facts { machines: None, agent: Some("a".into()), ..facts.clone() };
        for (code, facts, said) in [
            (ReasonCode::WaitingForSlots, &facts, "waits for 4 slots: 1 of 4 on 2 machines free"),
            (ReasonCode::WaitingForSlots, &one, "waits for 4 slots: 1 of 4 on \"a\" free"),
            (
                ReasonCode::TooFewSlots,
                &facts,
                "needs 4 slots; 2 online machines have 4 in all, 1 of them free",
            ),
            (ReasonCode::TooFewSlots, &one, "needs 4 slots; the largest online machine, \"a\", has 4"),
        ] {
            assert_eq!(words(&code, facts), format!("{said}{machines}"));
        }
        let many = (0..20).map(|n| on(&format!("m{n}"), 0, 1)).collect();
        let many = super::super::Reason::new(ReasonCode::WaitingForSlots, Facts { slots_on: many, ..facts });
        assert!(many.words().ends_with("0 of 1 on \"m7\", and others"), "{}", many.words());
    }
}
