//! Jobs whose loss uses a sample of the classes in each step (`loss.sample_share`).

use super::{Bench, assert_success};
use crate::server::training_permit;

#[tokio::test]
async fn a_job_with_sampled_classes_continues_to_the_same_bytes() {
    let _permit = training_permit().await;
    let bench = Bench::new();
    for (out, more) in [("data", &[][..]), ("hybrid", &["parallel.mode=hybrid", "parallel.model=2"][..])] {
        let always = ["loss.sample_share=0.3", "parallel.device=cpu"];
        let sets: Vec<&str> = always.iter().chain(more).flat_map(|set| ["--set", *set]).collect();
        let output = assert_success(&bench.train(out, &sets).output().expect("it runs"));
        assert!(output.contains("succeeded: validation accuracy "), "{output}");
        let from = bench.out(out).join("checkpoints/1-7").display().to_string();
        let resumed = format!("{out}-resumed");
        assert_success(
            &bench.train(&resumed, &[&sets[..], &["--resume", &from]].concat()).output().expect("it runs"),
        );
        assert!(bench.model(&resumed, "2-24") == bench.model(out, "2-24"), "{out}: other bytes");
    }
}
