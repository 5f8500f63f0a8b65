//! Writes every page, filled with invented data, as HTML files, to view a template without a server: `cargo run -p lockstep-web --example
//! render DIR`.

use jiff::{SignedDuration, Timestamp};
use lockstep_protocol::{
    JobSpec,
    agent::{CheckpointInfo, GpuSample, Machine, MachineSample, MachineWarning, RankReport, Slot},
    attempt::{Attempt, AttemptState},
    dataset::{BrokenFile, Dataset, DatasetInfo, SplitInfo},
    job::{Job, JobId, JobState, LastValues, Measured},
    spec::SpecError,
};
use lockstep_web::{datasets, job, jobs, layout, machines, submit};
use std::{fs, path::PathBuf};

const USER: layout::CurrentUser = layout::CurrentUser {
    who: String::new(),
    signed_in: true,
    is_admin: true,
    is_person: true,
    reads_only: false,
};
const URL: &str = "http://127.0.0.1:7070";

fn sample(
    name: &str,
    state: JobState,
    reason: Option<&str>,
    now: Timestamp,
    minutes: i64,
    share: f64,
) -> Job {
    let mut spec = JobSpec { name: name.into(), ..JobSpec::default() };
    spec.data.dataset = "cifar10".into();
    spec.train.batch_size = Some(128);
    spec.train.lr = 0.4;
    spec.parallel.ranks = 4;
    let step = (3900.0 * share) as u64;
    let started = now - SignedDuration::from_mins(minutes);
    Job {
        id: JobId::generate(),
        name: name.into(),
        state,
        reason: reason.map(Into::into),
        cause: reason.map(Into::into),
        failure: None,
        project: "default".into(),
        tags: Vec::new(),
        queue: None,
        notes: None,
        parent: None,
        owner: Some("ada".into()),
        unreadable: None,
        batch: None,
        warnings: Vec::new(),
        spec,
        external: None,
        attempt: u32::from(share > 0.0),
        ranks: 4,
        agents: if share > 0.0 { vec!["h200-a".into()] } else { vec![] },
        step,
        epoch: (step / 390 + 1).min(10) as u32,
        total_steps: if share > 0.0 { 3900 } else { 0 },
        steps_per_epoch: 390,
        images_per_second: (share > 0.0).then_some(38_940.0),
        eta_secs: (state == JobState::Running).then_some(12.0),
        created_at: started,
        started_at: (share > 0.0).then_some(started),
        finished_at: state.is_final().then_some(started + SignedDuration::from_secs(194)),
        ran_secs: state.is_final().then_some(187.0),
        best: (share > 0.2).then_some(Measured { value: 0.889, loss: None, step: 2340, epoch: 6 }),
        trial: None,
        diagnosis: None,
        last: LastValues {
            loss: (share > 0.0).then_some(0.4127),
            val_accuracy: Some(0.886),
            ..Default::default()
        },
        last_seq: 100,
        sparkline: (0..(40.0 * share) as u32)
            .map(|i| 2.4 * (-0.06 * i as f32).exp() + 0.1 * (i as f32 * 1.7).sin())
            .collect(),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = PathBuf::from(std::env::args().nth(1).ok_or("usage: render DIR")?);
    fs::create_dir_all(&dir)?;
    let write = |name: &str, html: String| fs::write(dir.join(name), html);
    let now = Timestamp::now();

    let list = vec![
        sample("cifar-resnet50", JobState::Running, None, now, 2, 0.7),
        sample("cifar-resnet50-lars", JobState::Queued, Some("needs 4 slots; 0 of 4 are free"), now, 3, 0.0),
        sample("fashion-resnet20", JobState::Succeeded, None, now, 41, 1.0),
        sample(
            "fold-3",
            JobState::Failed,
            Some("rank 3 was killed by signal 9 at step 1,041"),
            now,
            185,
            0.3,
        ),
        sample("fold-2", JobState::Cancelled, None, now, 60 * 24 * 3, 0.15),
        sample("tutorial", JobState::Lost, Some("machine node-7 has been silent for 31 s"), now, 9000, 0.5),
    ];
    let page = jobs::JobsPage {
        jobs: list.clone(),
        filter: jobs::JobFilter::default(),
        any: true,
        next: None,
        server_url: URL.into(),
        now,
        user: USER,
    };
    write("jobs.html", page.render()?)?;
    write("jobs-empty.html", jobs::JobsPage { jobs: vec![], any: false, ..page }.render()?)?;

    let report = |rank: u32| RankReport {
        status: "training".into(),
        step: 2736,
        epoch: 7,
        step_ms: 24.9,
        all_reduce_ms: 0.6,
        data_ms: 0.2,
        images_per_second: 9735.0,
        pid: 4000 + rank,
        device: format!("GPU {rank}"),
        axis_ms: None,
    };
    let checkpoint = |epoch: u32, accuracy: f64, best: bool| job::Checkpoint {
        id: format!("c{epoch}"),
        attempt: 1,
        info: CheckpointInfo {
            epoch,
            step: u64::from(epoch) * 390,
            val_accuracy: Some(accuracy),
            val_loss: Some(0.4),
            validation: None,
            best,
            size_bytes: 188_743_680,
        },
        stored: None,
    };
    let page = job::JobPage {
        job: list[0].clone(),
        ranks: (0..4)
            .map(|rank| job::RankPlace { rank, agent: "h200-a".into(), report: Some(report(rank)) })
            .collect(),
        checkpoints: vec![
            checkpoint(6, 0.889, true),
            checkpoint(5, 0.861, false),
            checkpoint(4, 0.842, false),
        ],
        attempts: vec![Attempt {
            attempt: 1,
            state: AttemptState::Running,
            reason: None,
            checkpoint: None,
            step: None,
            agents: vec!["h200-a".into()],
            started_at: now,
            ended_at: None,
        }],
        size_bytes: Some(566_000_000),
        files: vec![],
        server_url: URL.into(),
        may_change: true,
        user: USER,
        panels: job::Panels { from: "none", panels: vec![] },
        has_histograms: false,
        has_network: false,
        has_artifact_store: false,
    };
    write("job.html", page.render()?)?;
    write(
        "job-failed.html",
        job::JobPage { job: list[3].clone(), ranks: vec![], checkpoints: vec![], ..page }.render()?,
    )?;

    let classes: Vec<String> =
        ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"].iter().map(|c| (*c).into()).collect();
    let split = |name: &str, n: u64| SplitInfo { name: name.into(), samples: n * 5, per_class: vec![n; 5] };
    let sets = vec![Dataset {
        name: "fashion-mnist".into(),
        path: "/srv/data/fashion-mnist".into(),
        info: DatasetInfo {
            format: "idx".into(),
            classes,
            splits: vec![split("train", 12_000), split("test", 2000)],
            height: 28,
            width: 28,
            channels: 1,
            mean: vec![0.2860],
            std: vec![0.3530],
            broken: vec![BrokenFile {
                file: "train/x.jpg".into(),
                detail: "not a JPEG: starts with text".into(),
            }],
            broken_count: 1,
            ..DatasetInfo::default()
        },
        added_at: now - SignedDuration::from_hours(3),
        owner: Some("ada".into()),
        private: false,
    }];
    let page = datasets::DatasetsPage {
        changeable: std::collections::HashSet::new(),
        datasets: sets.clone(),
        may_add: true,
        form: Default::default(),
        server_url: URL.into(),
        now,
        user: USER,
    };
    write("datasets.html", page.render()?)?;
    write("datasets-empty.html", datasets::DatasetsPage { datasets: vec![], ..page }.render()?)?;

    let mut page = submit::SubmitPage::fresh(None, None, sets, 4, URL.into());
    write("submit.html", page.render()?)?;
    page.mistakes = vec![
        SpecError { pointer: "/train/lr".into(), detail: "must be above 0; it is -0.1".into() },
        SpecError { pointer: "/parallel/ranks".into(), detail: "8 ranks need 8 slots; 4 are online".into() },
        SpecError { pointer: "/train".into(), detail: "give either epochs or steps, not both".into() },
    ];
    write("submit-wrong.html", page.render()?)?;

    let agent = |name: &str, online: bool, busy: u32| machines::AgentCard {
        id: name.into(),
        name: name.into(),
        online,
        draining: false,
        last_seen_at: now - SignedDuration::from_secs(95),
        connected_at: online.then(|| now - SignedDuration::from_secs(9000)),
        lease_secs_left: (busy > 0).then_some(14.2),
        sample: online.then(|| MachineSample {
            at: now,
            cpus: 96.0,
            host_cpus: 96,
            cpu_utilization: Some(0.41),
            load: Some(38.2),
            memory_used_bytes: 212_000_000_000,
            memory_bytes: 1_082_000_000_000,
            host_memory_bytes: 1_082_000_000_000,
            disk_used_bytes: 1_100_000_000_000,
            disk_bytes: 4_500_000_000_000,
            disk_read_bytes_per_second: Some(910_000_000),
            disk_written_bytes_per_second: Some(4_000_000),
            network_received_bytes_per_second: Some(12_000_000),
            network_sent_bytes_per_second: Some(3_100_000),
            gpus: (0..busy.max(1))
                .map(|slot| GpuSample {
                    slot,
                    utilization: Some(0.97),
                    memory_used_bytes: 61_000_000_000,
                    temperature_celsius: Some(61.0),
                    power_watts: Some(655.0),
                })
                .collect(),
        }),
        warnings: vec![MachineWarning {
            problem: !online,
            text: "Its clock is 12 s behind the server's: times in its logs are off. Let NTP set both."
                .into(),
        }],
        machine: Machine {
            hostname: format!("{name}.example"),
            cpu: "AMD EPYC 9654".into(),
            cores: 96,
            memory_bytes: 1_082_000_000_000,
            disk_free_bytes: 3_400_000_000_000,
            version: "0.1.0".into(),
            ..Machine::default()
        },
        slots: (0..4)
            .map(|index| {
                let slot = Slot {
                    index,
                    device: "cuda".into(),
                    name: "NVIDIA H200".into(),
                    memory_bytes: 150_754_820_096,
                    uuid: Some(format!("GPU-{index}")),
                };
                let holder = machines::Holder {
                    job_id: list[0].id.to_string(),
                    job_name: list[0].name.clone(),
                    rank: index,
                };
                let kept_for = None;
                machines::SlotCell { slot, holder: (index < busy).then_some(holder), kept_for }
            })
            .collect(),
    };
    let page = machines::MachinesPage {
        agents: vec![agent("h200-a", true, 4), agent("h200-b", true, 0), agent("node-7", false, 0)],
        join: machines::Join {
            server_url: Some(URL.into()),
            with_token: true,
            name: "node-1".into(),
            ..machines::Join::default()
        },
        now,
        user: USER,
    };
    write("machines.html", page.render()?)?;
    write("machines-empty.html", machines::MachinesPage { agents: vec![], ..page }.render()?)?;
    let lost = layout::ErrorPage {
        user: USER,
        status: 404,
        title: "No job has this id".into(),
        detail: "It may have been deleted.".into(),
    };
    write("message.html", lost.render()?)?;
    Ok(())
}
