//! Jobs whose steps have a sample of the classes (`loss.sample_share`).

use super::{Bench, succeeded};
use crate::server::turn;

#[tokio::test]
async fn a_job_with_sampled_classes_continues_to_the_same_bytes() {
    let _turn = turn().await;
    let bench = Bench::new();
    for (out, more) in [("data", &[][..]), ("hybrid", &["parallel.mode=hybrid", "parallel.model=2"][..])] {
        let always = ["loss.sample_share=0.3", "parallel.device=cpu"];
        let sets: Vec<&str> = always.iter().chain(more).flat_map(|set| ["--set", *set]).collect();
        let said = succeeded(&bench.train(out, &sets).output().expect("it runs"));
        assert!(said.contains("succeeded: validation accuracy "), "{said}");
        let from = bench.out(out).join("checkpoints/1-7").display().to_string();
        let again = format!("{out}-again");
        succeeded(
            &bench.train(&again, &[&sets[..], &["--resume", &from]].concat()).output().expect("it runs"),
        );
        assert!(bench.model(&again, "2-24") == bench.model(out, "2-24"), "{out}: other bytes");
    }
}
