//! The commands of README.md, as written, on an empty machine with a folder of pictures.

use crate::{
    pages,
    pictures::{Pictures, SIDE},
    server::{Finished, Folder, TIMEOUT, Terminated, lockstep, training_permit},
};
use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

/// Writes `photos/<class>/*` and returns a picture of the class boot that is not among them.
fn photos(home: &Path, per_class: usize) -> image::GrayImage {
    let all = Pictures::bundled("train");
    let picture = |index: usize| {
        let side = SIDE as u32;
        image::GrayImage::from_raw(side, side, all.pixels_of(index).to_vec()).expect("28 x 28")
    };
    let of_class = |label: u8| (0..2_000).filter(|index| all.label_of(*index) == label).collect::<Vec<_>>();
    for (class, label) in [("boot", 9), ("trouser", 1)] {
        let folder = home.join("photos").join(class);
        fs::create_dir_all(&folder).expect("a folder");
        for index in of_class(label).into_iter().take(per_class) {
            picture(index).save(folder.join(format!("{index}.png"))).expect("a picture");
        }
    }
    picture(of_class(9)[per_class])
}

#[tokio::test]
async fn the_readme_s_eight_commands_classify_a_picture_on_an_empty_machine() {
    let _permit = training_permit().await;
    let blocks = pages::blocks("README.md", "sh");
    let block = blocks.iter().find(|block| block.contains("lockstep init ~/photos")).expect("the commands");
    let lines: Vec<_> = block.lines().collect();
    assert!(lines.len() <= 8, "{block}");
    // The first four lines build the program. The test starts `serve` on a free port.
    assert!(lines[4].starts_with("lockstep serve "), "{block}");
    let init = pages::line("README.md", "lockstep init ~/photos");
    let submit = pages::line("README.md", "lockstep submit lockstep.toml --watch");
    let predict = pages::line("README.md", "lockstep predict photos new.jpg");
    assert_eq!(lines[5..], [&init, &submit, &predict]);

    let folder = Folder::new();
    let home = folder.path().join("home");
    photos(&home, 40).save(folder.path().join("new.jpg")).expect("a picture");
    let mut serve = lockstep();
    serve
        .args(["serve", "--no-open", "--listen", "127.0.0.1:0", "--cpu-slots", "1"])
        .current_dir(folder.path());
    let log = fs::File::create(folder.path().join("serve.log")).expect("a log");
    let serve = Terminated(serve.stdout(Stdio::null()).stderr(log).spawn().expect("lockstep serve"));
    // The commands find the server only by the folder.
    let run_line = |line: &str| {
        let mut shell = pages::shell(line);
        for name in ["LOCKSTEP_SERVER", "LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE"] {
            shell.env_remove(name);
        }
        shell.env("HOME", &home).env("LOCKSTEP_CACHE", folder.path().join("cache"));
        Finished::of(shell.current_dir(folder.path()))
    };
    let since = Instant::now();
    while !run_line("lockstep machine list").stdout.contains("online") {
        assert!(since.elapsed() < TIMEOUT, "no machine: {:?}", run_line("lockstep machine list"));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    run_line(&init).assert_prints(&["80 train", " on this machine"]);
    let text = fs::read_to_string(folder.path().join("lockstep.toml")).expect("a job file");
    assert!(text.contains("validation = 0.2\nvalidation_seed = "), "{text}");
    let (command, _) = submit.split_once('#').expect("a comment");
    let trained = run_line(&format!("{command} --set train.epochs=5"));
    let last = trained.ok().lines().last().expect("a last line");
    assert!(last.contains("validation accuracy "), "{last}");
    // Pictures that are added later count at once. The job file names the folder by its path.
    photos(&home, 50);
    run_line("lockstep validate lockstep.toml").assert_prints(&["80 training pictures"]);
    let classified = run_line(&predict);
    assert!(classified.ok().starts_with("new.jpg: "), "{}", classified.stdout);
    assert!(
        ["boot ", "trouser "].iter().all(|class| classified.stdout.contains(class)),
        "{}",
        classified.stdout
    );
    assert!(classified.stderr.starts_with("photos (j"), "{}", classified.stderr);
    // The job has few validation pictures, so it has a diagnosis in any case.
    let shown = run_line("lockstep show photos");
    let diagnosis = shown.ok().lines().find(|line| line.starts_with("diagnosis")).unwrap_or_default();
    let expected = ["is uncertain: add pictures", "the network overfits", "no sign of overfitting"];
    assert!(expected.iter().any(|words| diagnosis.contains(words)), "{}", shown.stdout);
    drop(serve);
    assert!(!folder.path().join("lockstep-data/address").exists());
}
