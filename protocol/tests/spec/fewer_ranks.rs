//! Jobs that may continue with fewer ranks.

use super::*;

fn job(parallel: &str, recovery: &str, train: &str) -> String {
    format!("[data]\ndataset = \"d\"\n[train]\n{train}\n[parallel]\n{parallel}\n[recovery]\n{recovery}\n")
}

#[test]
fn min_ranks_is_at_most_ranks_and_needs_losses_independent_of_ranks() {
    for ranks in [2, 1024] {
        let line = format!("min_ranks = {ranks}");
        let spec = from_toml(&job(&format!("ranks = {ranks}"), &line, "")).expect("a job");
        assert_eq!(from_json(&serde_json::to_value(&spec).expect("plain data")), Ok(spec), "{line}");
    }
    let without_min_ranks = from_toml(&job("ranks = 8", "", "")).expect("no min_ranks");
    assert_eq!(without_min_ranks.fewer_ranks(), [0; 0], "the job waits for all ranks");

    for (parallel, line, expected) in [
        ("ranks = 2", "min_ranks = 3", "3 is more than parallel.ranks = 2: give 2 or less"),
        (
            "ranks = 2\nsync_batch_norm = false",
            "min_ranks = 1",
            "set parallel.sync_batch_norm = true, or leave min_ranks out",
        ),
        (
            "ranks = 2\ngradients_mean = false",
            "min_ranks = 1",
            "set parallel.gradients_mean = true, or leave min_ranks out",
        ),
    ] {
        assert_error(&job(parallel, line, ""), "/recovery/min_ranks", &[expected]);
    }
}

#[test]
fn pictures_of_a_step_are_the_same_on_fewer_ranks() {
    for train in ["batch_size = 6\naccumulate = 5", "global_batch_size = 240\naccumulate = 5"] {
        let whole = from_toml(&job("ranks = 8", "min_ranks = 2", train)).expect("valid");
        assert_eq!((whole.micro_batch_size(), whole.global_batch_size()), (6, 240));
        // The numbers of ranks that divide the 48 pictures of a micro-batch.
        assert_eq!(whole.fewer_ranks(), [6, 4, 3, 2], "{train}");
        for ranks in whole.fewer_ranks() {
            let fewer = whole.clone().on_ranks(ranks);
            assert_eq!((fewer.parallel.ranks, fewer.train.accumulate), (ranks, 5));
            assert_eq!(
                (fewer.micro_batch_size(), fewer.global_batch_size()),
                (48 / ranks, 240),
                "{train} on {ranks} ranks"
            );
            assert_eq!(fewer.steps_per_epoch(1000), whole.steps_per_epoch(1000));
        }
    }
    // The default is 32 per rank.
    let fewer = from_toml(&job("ranks = 4", "min_ranks = 1", "")).expect("valid").on_ranks(1);
    assert_eq!((fewer.micro_batch_size(), fewer.global_batch_size()), (128, 128));
    assert_error(
        &job("ranks = 8", "min_ranks = 5", "batch_size = 1"),
        "/recovery/min_ranks",
        &["the 8 pictures of a micro-batch cannot be divided over 5 to 7 ranks: give 4 or less"],
    );
    assert_error(
        &job("ranks = 4", "min_ranks = 3", "batch_size = 1"),
        "/recovery/min_ranks",
        &["cannot be divided over 3 ranks: give 2 or less"],
    );
}
