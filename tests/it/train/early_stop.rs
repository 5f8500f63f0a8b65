//! Early stopping, on a fold and with class weights.

use super::*;

#[tokio::test]
async fn a_run_without_improvement_stops_early_and_again_after_continuing() {
    let bench = Bench::new().await;
    let job = sets(&[
        "train.epochs=6",
        "stop.patience=1",
        "stop.metric=\"val_loss\"",
        "stop.min_delta=1000",
        "loss.class_weights=\"balanced\"",
        "data.folds=5",
        "data.fold=2",
    ]);
    let reason = "stopped early after step 20: validation loss has not improved by 1000 on the ";
    let output = bench.train_to_success("early", &job);
    for words in ["320 training and 80 validation pictures", "the loss weights classes by ", reason] {
        assert!(output.contains(words), "{words} in {output}");
    }
    // Continue from the middle of the second epoch, and from the last step, after which no step is left.
    for (out, from) in [("from-14", &*bench.checkpoint("early", "2-14")), ("early", "latest")] {
        let resume = [&job[..], &["--resume", from]].concat();
        let output = bench.train_to_success(out, &resume);
        assert!(output.contains(reason), "{output}");
        assert!(bench.model(out, "2-20") == bench.model("early", "2-20"), "from {from}");
    }
}
