//! Jobs whose loss uses a sample of the classes in each step (`loss.sample_share`).

use super::{Bench, sets};

#[tokio::test]
async fn a_job_with_sampled_classes_continues_to_the_same_bytes() {
    let bench = Bench::new().await;
    for (out, more) in [("data", &[][..]), ("hybrid", &["parallel.mode=hybrid", "parallel.model=2"][..])] {
        let always = ["loss.sample_share=0.3", "parallel.device=cpu"];
        let sets = sets(&[&always[..], more].concat());
        let output = bench.train_to_success(out, &sets);
        assert!(output.contains("succeeded: validation accuracy "), "{output}");
        let from = bench.checkpoint(out, "1-7");
        let resumed = format!("{out}-resumed");
        bench.train_to_success(&resumed, &[&sets[..], &["--resume", &from]].concat());
        assert!(bench.model(&resumed, "2-24") == bench.model(out, "2-24"), "{out}: other bytes");
    }
}
