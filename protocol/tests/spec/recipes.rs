//! The keys that a recipe sets, and the job's own keys that override them.

use super::*;
use lockstep_protocol::spec::{
    BrokenFiles, ImageSize, Recipe, ScheduleKind, SizeFrom, Validation, read_leniently,
};

fn job_text(recipe: &str, data: &str, train: &str) -> String {
    format!(
        "[model]\npretrained = \"weights.safetensors\"\n[data]\ndataset = \"d\"\n{data}\n[train]\nrecipe = {recipe:?}\n{train}"
    )
}

fn job(recipe: &str, data: &str, train: &str) -> Result<JobSpec, Vec<SpecError>> {
    from_toml(&job_text(recipe, data, train))
}

#[test]
fn fast_is_ffcv_s_recipe_and_scales_with_the_epochs() {
    let spec = job("fast", "", "batch_size = 512\n[parallel]\nranks = 8").expect("a job");
    let train = &spec.train;
    assert_eq!(
        (train.epochs, train.lr, train.schedule, train.pct_start),
        (Some(16), 1.7, ScheduleKind::OneCycle, 0.125)
    );
    assert_eq!((spec.data.validation_size, spec.data.resize_size), (Some(256), Some(292)));
    for (epochs, second_from) in [(16, 13), (88, 67), (4, 4), (2, 2)] {
        let spec = job("fast", "", &format!("epochs = {epochs}")).expect("a job");
        let sizes = [SizeFrom { epoch: 1, size: 160 }, SizeFrom { epoch: second_from, size: 192 }].to_vec();
        assert_eq!(spec.data.image_size, Some(ImageSize::Schedule(sizes)), "{epochs} epochs");
    }
    let spec = job("fast", "", "epochs = 1").expect("a job");
    assert_eq!(spec.data.image_size, Some(192.into()));
}

/// The published learning rates are for sums of losses and for logits divided by 256.
#[test]
fn cifar_94_has_the_published_learning_rates() {
    let spec = job("cifar-94", "", "global_batch_size = 2000").expect("a job");
    let train = &spec.train;
    assert_eq!((train.lr, train.epochs, train.schedule), (0.24, Some(8), ScheduleKind::OneCycle));
    let near = |found: f32, published: f32| (found / published - 1.0).abs() < 1e-3;
    assert!(near(train.lr * train.bias_lr / 2000.0, 0.053), "{}", train.bias_lr);
    assert!(near(train.lr * train.head_lr / 2000.0 * 256.0 * 256.0, 0.67), "{}", train.head_lr);
    assert!(near(train.lr * train.weight_decay, 2e-6 * 2000.0), "{}", train.weight_decay);
    assert_eq!(
        (spec.data.crop_padding, spec.data.reflect_border, spec.data.alternating_flip),
        (2, true, true)
    );
    assert_eq!((spec.evaluate.views, spec.evaluate.every_epochs), (6, 0));
}

#[test]
fn impossible_settings_with_muon_and_cifarnet_are_refused() {
    for (lines, pointer, expected) in [
        (
            "[train]\noptimizer = \"muon\"\n[parallel]\nranks = 2\noptimizer_sharding = true",
            "/train/optimizer",
            &["whole matrix", "optimizer_sharding"][..],
        ),
        (
            "[train]\noptimizer = \"muon\"\n[parallel]\nranks = 2\nmode = \"auto\"",
            "/train/optimizer",
            &["parallel.mode = \"data\""],
        ),
        ("[train]\noptimizer = \"muon\"\n[loss]\nsample_share = 0.5", "/train/optimizer", &["muon"]),
        (
            "[model]\narch = \"cifarnet\"\n[parallel]\nranks = 2\nmode = \"auto\"",
            "/model/arch",
            &["parallel.mode = \"data\""],
        ),
        ("validation_size = 40\n[model]\narch = \"cifarnet\"", "/data/validation_size", &["one size"]),
        ("[evaluate]\nviews = 3", "/evaluate/views", &["1, 2 or 6"]),
    ] {
        assert_error(&job_with("data", lines), pointer, expected);
    }
    let data_parallel = "[train]\noptimizer = \"muon\"\n[parallel]\nranks = 4";
    assert!(from_toml(&job_with("data", data_parallel)).is_ok());
}

#[test]
fn the_learning_rate_scales_with_the_pictures_of_a_step_unless_given() {
    for (recipe, train, parallel, lr) in [
        ("imagenet", "batch_size = 32", 8, 0.1),
        ("imagenet", "batch_size = 32\naccumulate = 2", 8, 0.2),
        ("imagenet", "global_batch_size = 8192", 8, 3.2),
        ("imagenet", "", 1, 0.0125),
        ("cifar", "global_batch_size = 128", 4, 0.1),
        ("finetune", "batch_size = 64", 1, 0.0025),
        ("imagenet", "lr = 0.3\nglobal_batch_size = 8192", 8, 0.3),
    ] {
        let train = format!("{train}\n[parallel]\nranks = {parallel}");
        let spec = job(recipe, "", &train).unwrap_or_else(|e| panic!("{recipe}, {train}: {e:?}"));
        assert_eq!(spec.train.lr, lr, "{recipe}, {train}");
    }
}

#[test]
fn the_job_s_keys_override_the_recipe_s_keys() {
    let spec = job(
        "imagenet",
        "horizontal_flip = false\nvalidation = 0.2",
        "weight_decay = 0\nschedule = \"cosine\"\nlabel_smoothing = 0.1",
    )
    .expect("a job");
    assert!(!spec.data.horizontal_flip && spec.data.random_resized_crop);
    assert_eq!(spec.data.validation, Validation::Fraction(0.2));
    assert_eq!((spec.train.weight_decay, spec.train.label_smoothing), (0.0, 0.1));
    assert_eq!((spec.train.schedule, spec.train.epochs), (ScheduleKind::Cosine, Some(90)));

    // Of two keys with the same meaning, the job's key is used.
    let spec = job("imagenet", "", "steps = 100").expect("a job");
    assert_eq!((spec.train.epochs, spec.train.steps), (None, Some(100)));
    let spec = job("imagenet-2021", "image_size = 96", "").expect("a job");
    assert_eq!(spec.data.effective_validation_size(), Some(96));
    assert_eq!(spec.data.resize_size, None, "232 pixels belong to the recipe's crop");

    // Null means absent.
    let document = json!({"data": {"dataset": "d"}, "train": {"recipe": "imagenet", "epochs": null}});
    assert_eq!(from_json(&document).expect("a job").train.epochs, Some(90));
}

#[test]
fn schedules_scale_with_the_number_of_epochs() {
    for (epochs, milestones) in [(90, &[30, 60][..]), (30, &[10, 20]), (2, &[1]), (1, &[1])] {
        let spec = job("imagenet", "", &format!("epochs = {epochs}")).expect("a job");
        assert_eq!((spec.train.epochs, &spec.train.milestones[..]), (Some(epochs), milestones));
    }
    for (recipe, epochs, warmup) in [("finetune", 1, 0.1), ("finetune", 20, 1.0), ("imagenet-2021", 6, 0.05)]
    {
        let spec = job(recipe, "", &format!("epochs = {epochs}")).expect("a job");
        assert_eq!(spec.train.warmup_epochs, warmup, "{recipe} of {epochs} epochs");
    }
    let spec = job("imagenet", "", "epochs = 30\nmilestones = [5]").expect("a job");
    assert_eq!(spec.train.milestones, [5]);
    let spec = job("imagenet", "", "epochs = 100000").expect("at the limit");
    assert_eq!(spec.train.milestones, [33_333, 66_666]);
}

#[test]
fn a_resolved_job_is_read_back_unchanged_and_needs_no_recipe() {
    for (recipe, name) in Recipe::ALL.into_iter().zip(Recipe::NAMES) {
        for train in ["", "steps = 7", "epochs = 3\nglobal_batch_size = 4096", "lr = 1.0"] {
            let spec = job(name, "", train).unwrap_or_else(|e| panic!("{name}, {train}: {e:?}"));
            assert_eq!((spec.train.recipe, recipe.as_str()), (Some(recipe), name));
            let mut stored = serde_json::to_value(&spec).expect("plain data");
            assert_eq!(from_json(&stored).as_ref(), Ok(&spec), "{name}, {train}");
            assert_eq!(read_leniently(&stored), (spec.clone(), Vec::new()));
            assert_eq!(stored["train"]["recipe"], name);
            stored["train"].as_object_mut().expect("a table").remove("recipe");
            let mut without_recipe = spec;
            without_recipe.train.recipe = None;
            assert_eq!(from_json(&stored), Ok(without_recipe), "{name}, {train}");
        }
    }
    let stored =
        serde_json::to_value(from_toml("[data]\ndataset = \"d\"").expect("a job")).expect("plain data");
    assert!(stored["train"].get("recipe").is_none(), "without a recipe, the key is not stored");
}

#[test]
fn errors_name_the_recipes_and_the_keys_that_a_recipe_needs() {
    assert_error(
        &job_text("imagnet", "", ""),
        "/train/recipe",
        &["one of imagenet, imagenet-2021, fast, cifar", "did you mean \"imagenet\""],
    );
    assert_error("[train]\nrecipe = 1\n[data]\ndataset = \"d\"", "/train/recipe", &["imagenet-2021", "is 1"]);
    assert_error(
        "[train]\nrecipe = \"finetune\"\n[data]\ndataset = \"d\"",
        "/model/pretrained",
        &["trained weights", "safetensors"],
    );
    let spec = job("finetune", "", "").expect("a job");
    assert_eq!(spec.data.broken_files, BrokenFiles::Skip);
    // 0.1 for 256 pictures is 10,000 for 25,600,000.
    let at_limit = "batch_size = 25000\n[parallel]\nranks = 1024";
    assert_eq!(job("imagenet", "", at_limit).expect("at the limit").train.lr, 10_000.0);
    let above_limit = "batch_size = 25001\n[parallel]\nranks = 1024";
    assert_error(&job_text("imagenet", "", above_limit), "/train/lr", &["10000.4", "25601024", "give lr"]);
}
