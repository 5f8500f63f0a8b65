//! Names that keys and values had before. Those of the last version are accepted; older ones are refused, with today's name in
//! the error, where somebody submits them, and read where they are stored.

use lockstep_protocol::{
    JobId, JobSpec,
    agent::{AttemptRef, StartAttempt},
    spec::{
        ACCEPTED, Augment, ImageSize, Recipe, SizeFrom, SpecError, apply_set, from_json, from_toml,
        is_renamed, name_today, read_leniently,
    },
};
use serde_json::{Value, json};

/// Section, line with the old name, path of the old name, what is said of it.
const OLD: [(&str, &str, &str, &str); 7] = [
    ("", "recipe = \"cifar\"", "recipe", "recipe is called train.recipe"),
    ("data", "resize = 256", "data.resize", "data.resize is called data.resize_size"),
    ("data", "auto_augment = \"none\"", "data.auto_augment", "data.auto_augment is called data.augment"),
    (
        "data",
        "auto_augment = \"trivial_augment\"",
        "data.auto_augment",
        "data.auto_augment is called data.augment, and \"trivial_augment\" is \"trivial\"",
    ),
    (
        "data",
        "auto_augment = \"rand_augment\"",
        "data.auto_augment",
        "data.auto_augment is called data.augment, and \"rand_augment\" is \"rand\"",
    ),
    ("train", "mixup_alpha = 0.2", "train.mixup_alpha", "train.mixup_alpha is called train.mixup"),
    ("train", "cutmix_alpha = 1.0", "train.cutmix_alpha", "train.cutmix_alpha is called train.cutmix"),
];

fn toml(section: &str, line: &str) -> String {
    match section {
        "" => format!("{line}\n[data]\ndataset = \"d\"\n"),
        "data" => format!("[data]\ndataset = \"d\"\n{line}\n"),
        _ => format!("[data]\ndataset = \"d\"\n[{section}]\n{line}\n"),
    }
}

#[test]
fn an_old_name_is_refused_with_the_new_one() {
    for (section, line, path, said) in OLD {
        let expected = [SpecError { pointer: format!("/{}", path.replace('.', "/")), detail: said.into() }];
        assert_eq!(from_toml(&toml(section, line)).unwrap_err(), expected, "{line}");
        // As a program or `--set` gives it.
        let mut document = json!({"data": {"dataset": "d"}});
        apply_set(&mut document, &format!("{path}={}", line.split_once(" = ").unwrap().1)).unwrap();
        assert_eq!(from_json(&document).unwrap_err(), expected, "{document}");
        assert!(is_renamed(path), "{path}");
        // Also together with the new name, and without a value.
        let new = said.split(' ').nth(3).unwrap().trim_end_matches(',');
        assert!(!is_renamed(new), "{new}");
        apply_set(&mut document, &format!("{new}=")).unwrap();
        apply_set(&mut document, &format!("{path}=")).unwrap();
        assert_eq!(from_json(&document).unwrap_err()[0].pointer, expected[0].pointer, "{document}");
    }
    // The words of an old value under the new name.
    for (old, new) in [("trivial_augment", "trivial"), ("rand_augment", "rand")] {
        let found = from_toml(&toml("data", &format!("augment = {old:?}"))).unwrap_err();
        assert!(found[0].detail.contains(&format!("did you mean {new:?}")), "{found:?}");
    }
    let found = from_toml(&toml("data", "image_size = [{ epoch = 1, size = 128 }]")).unwrap_err();
    assert!(found[0].detail.ends_with("entry 1 is a table: write [1, 128]"), "{found:?}");
}

#[test]
fn every_new_name_is_accepted() {
    let spec = from_toml(
        "[data]\ndataset = \"d\"\nimage_size = [[1, 128], [4, 192]]\nresize_size = 224\naugment = \"rand\"\n\
         [train]\nrecipe = \"cifar\"\nmixup = 0.2\ncutmix = 1.0",
    )
    .unwrap();
    let sizes = [(1, 128), (4, 192)].map(|(epoch, size)| SizeFrom { epoch, size }).to_vec();
    assert_eq!(spec.data.image_size, Some(ImageSize::Schedule(sizes)));
    assert_eq!((spec.data.resize_size, spec.data.augment), (Some(224), Augment::Rand));
    assert_eq!((spec.train.recipe, spec.train.mixup, spec.train.cutmix), (Some(Recipe::Cifar), 0.2, 1.0));
    let stored = serde_json::to_value(&spec).unwrap();
    assert_eq!(stored["data"]["image_size"], json!([[1, 128], [4, 192]]));
    assert_eq!((&stored["data"]["augment"], &stored["train"]["recipe"]), (&json!("rand"), &json!("cifar")));
}

/// What was stored is what it would be with the new names, so no job changes.
#[test]
fn a_stored_specification_with_old_names_is_read() {
    let new = from_toml(
        "[data]\ndataset = \"d\"\nimage_size = [[1, 128], [4, 192]]\nresize_size = 224\naugment = \"trivial\"\n\
         [train]\nrecipe = \"cifar\"\nmixup = 0.2\ncutmix = 1.0",
    )
    .unwrap();
    let mut old = serde_json::to_value(&new).unwrap();
    old["recipe"] = take(&mut old["train"], "recipe");
    old["data"]["resize"] = take(&mut old["data"], "resize_size");
    take(&mut old["data"], "augment");
    old["data"]["auto_augment"] = json!("trivial_augment");
    old["data"]["image_size"] = json!([{"epoch": 1, "size": 128}, {"epoch": 4, "size": 192}]);
    old["train"]["mixup_alpha"] = take(&mut old["train"], "mixup");
    old["train"]["cutmix_alpha"] = take(&mut old["train"], "cutmix");
    assert_eq!(from_json(&old).unwrap_err().len(), 6, "nobody submits it");
    assert_eq!(read_leniently(&old), (new.clone(), Vec::new()));

    // Where both names stand, the new one counts, and the other is reported.
    old["data"]["resize_size"] = json!(224);
    old["data"]["resize"] = json!(300);
    let (read, flaws) = read_leniently(&old);
    assert_eq!((read, flaws.len(), flaws[0].pointer.as_str()), (new, 1, "/data/resize"));
    // Of what cannot be read nothing else is lost.
    for broken in [
        json!({"data": 3, "recipe": "cifar"}),
        json!({"train": [], "recipe": "cifar"}),
        json!([1]),
        Value::Null,
    ] {
        assert!(!read_leniently(&broken).1.is_empty(), "{broken}");
    }
}

fn take(table: &mut Value, key: &str) -> Value {
    table.as_object_mut().unwrap().remove(key).unwrap()
}

/// Each with a value that is not the default.
const OF_THE_LAST_VERSION: [(&str, &str, f32); 2] =
    [("train.rise", "train.pct_start", 0.125), ("train.final_lr_share", "train.final_lr_fraction", 0.25)];

#[test]
fn a_name_of_the_last_version_makes_the_same_job() {
    assert_eq!(OF_THE_LAST_VERSION.len(), ACCEPTED.len(), "every accepted name is tried here");
    for (old, new, value) in OF_THE_LAST_VERSION {
        assert_eq!((name_today(old).as_str(), name_today(new).as_str()), (new, new));
        let key = |path: &str| path.strip_prefix("train.").unwrap().to_owned();
        for recipe in ["", "recipe = \"fast\"\n"] {
            let rest = format!("schedule = \"one_cycle\"\n{recipe}");
            let made =
                |path: &str| from_toml(&toml("train", &format!("{} = {value}\n{rest}", key(path)))).unwrap();
            let spec = made(new);
            assert!([spec.train.pct_start, spec.train.final_lr_fraction].contains(&value), "{new}");
            assert_eq!(made(old), spec, "{old}");
            let stored = serde_json::to_string(&spec).unwrap();
            assert_eq!(serde_json::to_string(&made(old)).unwrap(), stored, "only today's name is stored");
            assert!(!stored.contains(&format!("{:?}", key(old))), "{stored}");
        }
        // As a program or `--set` gives it.
        let mut document = json!({"data": {"dataset": "d"}});
        apply_set(&mut document, &format!("{old}={value}")).unwrap();
        let spec = from_json(&document).unwrap();
        apply_set(&mut document, &format!("{old}=")).unwrap();
        apply_set(&mut document, &format!("{new}={value}")).unwrap();
        assert_eq!(spec, from_json(&document).unwrap());
        assert_eq!(read_leniently(&serde_json::from_str(&old_text(&spec)).unwrap()), (spec, Vec::new()));
    }
}

/// The text of a specification as the last version stored it.
fn old_text(spec: &JobSpec) -> String {
    let mut text = serde_json::to_string(spec).unwrap();
    for (_, old, new) in ACCEPTED {
        text = text.replace(&format!("{new:?}:"), &format!("{old:?}:"));
    }
    text
}

#[test]
fn both_names_of_a_key_are_one_mistake_that_names_both() {
    for (old, new, value) in OF_THE_LAST_VERSION {
        let mut document = json!({"data": {"dataset": "d"}});
        apply_set(&mut document, &format!("{new}={value}")).unwrap();
        // Also when both have the same value: somebody will change one of them.
        for given in [value, 0.5] {
            apply_set(&mut document, &format!("{old}={given}")).unwrap();
            let expected = SpecError {
                pointer: format!("/{}", old.replace('.', "/")),
                detail: format!("{old} is the old name of {new}: give {new} alone, not both"),
            };
            assert_eq!(from_json(&document).unwrap_err(), [expected]);
        }
    }
    // A value that does not fit is reported under today's name.
    let found = from_toml(&toml("train", "rise = 2.0")).unwrap_err();
    assert_eq!(found[0].pointer, "/train/pct_start", "{found:?}");
}

/// What an agent of the last version has left on disk for the ranks that it started.
#[test]
fn an_agent_reads_the_attempts_of_one_of_the_last_version() {
    let spec = from_toml(&toml("train", "pct_start = 0.125\nfinal_lr_fraction = 0.25")).unwrap();
    let start = StartAttempt {
        attempt: AttemptRef { job: JobId::generate(), attempt: 3, fencing_token: 41.into() },
        spec: spec.clone(),
        dataset_path: "/data".into(),
        world_size: 1,
        ranks: vec![(0, 0)],
        master_addr: "127.0.0.1".into(),
        master_port: 0,
        secret: "00".into(),
        job_dir: None,
        resume: None,
        network: None,
        files: Default::default(),
    };
    let mut old = serde_json::to_value(&start).unwrap();
    take(&mut old["attempt"], "fencing_token");
    old["attempt"]["token"] = 41.into();
    old["spec"] = serde_json::from_str(&old_text(&spec)).unwrap();
    assert!(old["spec"]["train"].get("rise").is_some());
    assert_eq!(serde_json::from_value::<StartAttempt>(old).unwrap(), start);
}

#[test]
fn a_path_below_an_accepted_old_name_is_one_below_today_s() {
    for (section, old, new) in ACCEPTED {
        let path = format!("{section}.{old}.a");
        assert_eq!(name_today(&path), format!("{section}.{new}.a"));
        // A fork has every key under its current name, so this one does not collide with another name of the same key.
        let mut document = json!({ section: { new: 0.5 } });
        let error =
            lockstep_protocol::spec::set_key(&mut document, &name_today(&path), json!(1)).unwrap_err();
        assert!(error.contains("the part before \"a\" is no table"), "{error}");
    }
    for other in ["train.riser", "train", "rise", "rise.a", "data.rise.a"] {
        assert_eq!(name_today(other), other);
    }
}
