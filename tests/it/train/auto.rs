//! Ranks that choose their plan (`parallel.mode = "auto"`).

use super::{Bench, MAX_PLAN_DIFFERENCE, assert_success, layers::recorded};
use crate::tensors::max_difference;
use std::fs;

#[tokio::test]
async fn ranks_with_an_automatic_plan_match_one_rank_and_record_the_plan() {
    let bench = Bench::new().await;
    // 13 steps per epoch; the plan's time is measured over 10 steps.
    let always = [
        "train.epochs=1",
        "data.drop_remainder=false",
        "data.image_size=16",
        "parallel.device=cpu",
        "train.lr=0.0001",
    ];
    let run = |out: &str, sets: &[&str]| {
        let mut command = bench.train(out, &super::sets(&[&always[..], sets].concat()));
        assert_success(&command.env("LOCKSTEP_CACHE", bench.out("cache")).output().expect("it runs"))
    };
    run("one", &["parallel.ranks=1"]);
    let measured = run("first", &["parallel.mode=auto"]);
    assert!(measured.contains("measuring operators and links, to choose a plan"), "{measured}");
    let files =
        fs::read_dir(bench.out("cache")).expect("the cache").map(|entry| entry.expect("a file").path());
    let files: Vec<_> = files.filter(|file| file.extension().is_some_and(|name| name == "json")).collect();
    let [measurements] = &files[..] else { panic!("{files:?}") };
    let last = bench.model("one", "1-13");
    let auto = "parallel.mode=auto";
    // The fastest plan depends on the machine and its load, but keeps the height and model that the job sets (`pinned`).
    for (out, ranks, sets, pinned) in [
        ("two", 2, &[auto][..], [None, None]),
        ("four", 4, &[auto, "parallel.ranks=4", "parallel.model=2"], [None, Some(2)]),
        ("rows", 4, &[auto, "parallel.ranks=4", "parallel.height=2"], [Some(2), None]),
    ] {
        let text = run(out, sets);
        for words in ["plan: ", "the prediction is ", "a step takes ", "= 32 pictures per step"] {
            assert!(text.contains(words), "{out}: {words} in {text}");
        }
        // Measurements are cached for each number of ranks.
        assert_eq!(text.contains("measuring operators"), out == "four", "{out}: {text}");
        let difference = max_difference(&bench.model(out, "1-13"), &last);
        assert!(difference < MAX_PLAN_DIFFERENCE, "{out}: {difference}");
        let (_, networks) = recorded(&bench, out, 0);
        let [first, .., timed] = &networks[..] else { panic!("{networks:?}") };
        let plans = [first, timed].map(|network| network.plan.as_ref().expect("a plan"));
        let mesh = [plans[0].height, plans[0].model];
        assert_eq!(plans[0].data * mesh[0] * mesh[1], ranks);
        assert!(
            pinned.iter().zip(mesh).all(|(pin, chosen)| pin.is_none_or(|pin| pin == chosen)),
            "{out}: {mesh:?}"
        );
        let predicted = plans[0].predicted.as_ref().map(|cost| cost.step_ms);
        assert!(predicted > Some(0.0) && plans[0].measured_step_ms.is_none());
        assert!(plans[1].measured_step_ms > Some(0.0), "{plans:?}");
        assert!(plans[1].measured_memory_bytes > Some(1 << 20), "{plans:?}");
        assert!(timed.layers.iter().all(|layer| layer.plan.is_some()) && timed.check() == Ok(()));
    }
    // Damaged measurements are repeated and replaced, even if they can still be read.
    let halve = |file: &mut Vec<u8>| file.truncate(file.len() / 2);
    let change_digit = |file: &mut Vec<u8>| {
        let last = file.iter().rposition(u8::is_ascii_digit).expect("a digit");
        file[last] ^= 1;
    };
    for (out, damage) in [("half", halve as fn(&mut Vec<u8>)), ("digit", change_digit)] {
        let mut damaged = fs::read(measurements).expect("measurements");
        damage(&mut damaged);
        fs::write(measurements, &damaged).expect("measurements");
        let text = run(out, &[auto]);
        assert!(text.contains("measuring operators"), "{out}: {text}");
        assert_ne!(fs::read(measurements).expect("measurements"), damaged, "{out}");
    }
    // A plan that is impossible is refused before training.
    let mut command =
        bench.train("none", &["--set", auto, "--set", "parallel.shard=[{match=\"fc\", split=\"groups\"}]"]);
    let refused = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("fc cannot be split by \"groups\""), "{text}");
}
