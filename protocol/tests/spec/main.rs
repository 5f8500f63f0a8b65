//! Reading specifications, and the errors for mistakes in them.

mod fewer_ranks;
mod limits;
mod recipes;

use lockstep_protocol::{
    limits::{KEY_BYTES, KEY_PARTS, MAX_MISTAKES, TOML_NESTING},
    spec::{JobSpec, SpecError, apply_set, from_json, from_toml, toml_document},
};
use serde_json::json;

fn mistakes(toml: &str) -> Vec<SpecError> {
    from_toml(toml).expect_err("has mistakes")
}

#[track_caller]
fn assert_error(toml: &str, pointer: &str, parts: &[&str]) {
    let found = mistakes(toml);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].pointer, pointer, "{found:?}");
    for part in parts {
        assert!(found[0].detail.contains(part), "{:?} should contain {part:?}", found[0].detail);
    }
}

/// A valid document with `line` added to `section`.
fn job_with(section: &str, line: &str) -> String {
    if section == "data" {
        format!("[data]\ndataset = \"d\"\n{line}\n")
    } else {
        format!("[data]\ndataset = \"d\"\n[{section}]\n{line}\n")
    }
}

#[test]
fn defaults_are_those_of_the_tutorial_job() {
    let spec = from_toml("[data]\ndataset = \"cifar10\"").expect("only the dataset is required");
    assert_eq!((spec.train.lr, spec.train.momentum), (0.01, 0.9));
    assert_eq!((spec.micro_batch_size(), spec.total_steps(50_000)), (32, 10 * 1562));
}

#[test]
fn image_size_is_one_number_or_a_schedule() {
    let entries = |count: u32| {
        let entries: Vec<_> = (1..=count).map(|n| format!("[{n}, {}]", 14 + 2 * n)).collect();
        format!("image_size = [{}]", entries.join(", "))
    };
    for (line, validation_size) in [
        ("image_size = 8\n[model]\narch = \"resnet20\"", 8),
        ("image_size = 4096", 4096),
        ("image_size = [[1, 128], [10, 192]]", 192),
        ("image_size = [[1, 128]]\nvalidation_size = 128", 128),
        ("image_size = 176\nvalidation_size = 224\nresize_size = 232", 224),
        ("image_size = 175", 175),
        ("validation_size = 4096", 4096),
        (&entries(8), 30),
    ] {
        let spec = from_toml(&job_with("data", line)).unwrap_or_else(|e| panic!("{line}: {e:?}"));
        assert_eq!(spec.data.effective_validation_size(), Some(validation_size), "{line}");
        assert_eq!(from_json(&serde_json::to_value(&spec).expect("plain data")), Ok(spec.clone()), "{line}");
        assert_eq!(from_toml(&toml::to_string(&spec).expect("TOML")), Ok(spec), "{line}");
    }
    let plain = from_toml(&job_with("data", "image_size = 224")).expect("a job");
    let stored = serde_json::to_value(&plain).expect("plain data");
    assert_eq!(stored["data"]["image_size"], 224);
    assert!(stored["data"].get("validation_size").is_none(), "an absent key is not stored");

    let image_size = |value: &str| format!("image_size = {value}");
    for (value, expected) in [
        ("[]", &["1 to 8 sizes, has 0"][..]),
        (&entries(9)["image_size = ".len()..], &["1 to 8 sizes, has 9"]),
        ("[128, 192]", &["entry 1 is not [epoch, pixels]", "[epoch, pixels]", "[[1, 128], [14, 192]]"]),
        ("[[1]]", &["entry 1 is not [epoch, pixels]"]),
        ("\"128, 192\"", &["(in the form of a new job: 1: 128, 14: 192)"]),
        ("[[1, 128, 1]]", &["entry 1 is not [epoch, pixels]"]),
        ("[{ epoch = 1 }]", &["entry 1 is not [epoch, pixels]"]),
        ("[[1, 128], { epoch = 13, size = 192 }]", &["entry 2 is a table: write [13, 192]"]),
        ("[[2, 128]]", &["begin in epoch 1, begins in 2"]),
        ("[[0, 128]]", &["epoch must be a whole number from 1 to 100,000, is 0"]),
        ("[[1, 7]]", &["pixels must be a whole number from 8 to 4,096, is 7"]),
        ("[[1, 4097]]", &["is 4097"]),
        ("[[1, 128], [1, 192]]", &["must ascend", "192 pixels from epoch 1"]),
        ("[[1, 128], [2, 128]]", &["must ascend"]),
        ("[[1, 192], [2, 128]]", &["must ascend"]),
        ("[[1, 128], [11, 192]]", &["begin in epoch 11", "ends with epoch 10"]),
        ("[[1, 127], [2, 192]]", &["127 is odd"]),
        ("[[1, 14], [2, 32]]", &["14 is too small for resnet50"]),
    ] {
        assert_error(&job_with("data", &image_size(value)), "/data/image_size", expected);
    }
    let late = "steps = 5\n[data]\ndataset = \"d\"\nimage_size = [[1, 128], [99, 192]]";
    // The number of epochs is unknown if steps are given.
    assert!(from_toml(&format!("[train]\n{late}")).is_ok());
    let sizes = |line: &str| job_with("data", &format!("image_size = 176\n{line}"));
    assert_error(
        &sizes("validation_size = 174"),
        "/data/validation_size",
        &["less than the size that training ends with", "give 176"],
    );
    assert_error(&sizes("validation_size = 225"), "/data/validation_size", &["225 is odd"]);
    assert_error(&sizes("validation_size = 7"), "/data/validation_size", &["from 8 to 4,096"]);
    assert_error(&sizes("validation_size = 4097"), "/data/validation_size", &["from 8 to 4,096"]);
    assert_error(
        &sizes("validation_size = 224\nresize_size = 223"),
        "/data/resize_size",
        &["validation_size = 224", "give 256 or more"],
    );
}

#[test]
fn a_stored_specification_is_read_back_unchanged() {
    // TOML's integers end at 2^63 - 1; JSON's do not.
    assert!(from_toml(&job_with("train", "seed = 18446744073709551615")).is_err());
    let spec = from_json(&json!({"data": {"dataset": "d"}, "train": {"seed": u64::MAX}})).expect("valid");
    assert_eq!(from_json(&serde_json::to_value(&spec).expect("plain data")), Ok(spec));
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let found = mistakes(
        "nam = \"x\"\n[model]\narch = \"resnet5\"\n[train]\nepochs = \"ten\"\nbatchsize = 8\n[data]\ndataset = \"d\"\nimage_size = 0",
    );
    let pointers: Vec<_> = found.iter().map(|e| e.pointer.as_str()).collect();
    assert_eq!(pointers, ["/nam", "/model/arch", "/data/image_size", "/train/epochs", "/train/batchsize"]);
}

#[test]
fn the_error_of_a_wrong_value_says_which_values_are_allowed() {
    for (section, line, key, expected) in [
        ("train", "epochs = \"ten\"", "epochs", &["a whole number from 1 to 100,000", "\"ten\""][..]),
        ("train", "epochs = 1000000000", "epochs", &["from 1 to 100,000", "1000000000"]),
        ("train", "epochs = 1.5", "epochs", &["whole number", "1.5"]),
        ("train", "lr = 0", "lr", &["above 0"]),
        ("train", "lr = nan", "lr", &["a number"]),
        ("train", "lr = \"0,01\"", "lr", &["is \"0,01\"; write 0.01"]),
        ("train", "momentum = 1.0", "momentum", &["below 1"]),
        (
            "train",
            "optimizer = \"adam\"",
            "optimizer",
            &["momentum, nesterov, lars, adamw, lamb", "did you mean \"adamw\""],
        ),
        ("train", "optimizer = \"sgd\"", "optimizer", &["\"momentum\" is SGD with momentum"]),
        ("train", "beta1 = -0.1", "beta1", &["at least 0"]),
        ("train", "mixup = 100.1", "mixup", &["at most 100"]),
        ("train", "epsilon = 0.0", "epsilon", &["at least 0.0000000000000001"]),
        ("train", "milestones = [3, 2]", "milestones", &["ascending"]),
        ("train", "milestones = [100001]", "milestones", &["at most 1,000", "1 to 100,000"]),
        ("train", "loss_scale = \"static\"", "loss_scale", &["dynamic"]),
        ("train", "loss_scale = 1e10", "loss_scale", &["at most 1,000,000,000"]),
        ("train", "seed = -1", "seed", &["from 0"]),
        ("data", "image_size = 0", "image_size", &["from 8 to 4,096"]),
        ("data", "validation = 1.5", "validation", &["fraction"]),
        ("data", "validation = \"../x\"", "validation", &["a split"]),
        ("data", "std = [0.0]", "std", &["positive"]),
        ("data", "mean = [0.1, 0.2]", "mean", &["1 or 3"]),
        ("data", "horizontal_flip = 1", "horizontal_flip", &["true or false"]),
        (
            "data",
            "crop_scale = [0.5, 0.4]",
            "crop_scale",
            &["the smallest and the largest", "0.001 to 1", "is [0.5,0.4]", "such as [0.08, 1.0]"],
        ),
        ("data", "crop_scale = 0.5", "crop_scale", &["is 0.5", "write them as a list, such as [0.08, 1.0]"]),
        ("data", "crop_ratio = [2, 1]", "crop_ratio", &["is [2,1]", "such as [0.75, 1.3333]"]),
        ("data", "crop_scale = [0.0009, 1.0]", "crop_scale", &["0.001 to 1"]),
        ("data", "crop_scale = [0.5, 1.001]", "crop_scale", &["0.001 to 1"]),
        ("data", "crop_scale = [0.5]", "crop_scale", &["two numbers"]),
        ("data", "crop_scale = [nan, 1.0]", "crop_scale", &["two numbers"]),
        ("data", "crop_ratio = [0.0624, 1.0]", "crop_ratio", &["0.0625 to 16"]),
        ("data", "crop_ratio = [1.0, 16.1]", "crop_ratio", &["0.0625 to 16"]),
        (
            "data",
            "resize_size = 223\nimage_size = 224",
            "resize_size",
            &["image_size = 224", "give 256 or more"],
        ),
        ("data", "color_jitter = [10.1, 0, 0, 0]", "color_jitter", &["0 to 10", "four numbers"]),
        ("data", "color_jitter = [0, 0, -0.1, 0]", "color_jitter", &["0 to 10"]),
        ("data", "color_jitter = [0, 0, 0, 0.51]", "color_jitter", &["hue (0 to 0.5)"]),
        ("data", "color_jitter = [0, 0, 0]", "color_jitter", &["four numbers"]),
        ("data", "augment = \"randaugment\"", "augment", &["none, trivial, rand", "did you mean \"rand\""]),
        ("loss", "kind = \"arc\"", "kind", &["softmax, arcface, cosface", "did you mean \"arcface\""]),
        ("loss", "margin = 0.5", "margin", &["needs loss.kind"]),
        (
            "train",
            "mixup = 0.2\n[loss]\nkind = \"cosface\"\n[parallel]\ndevice = \"cpu\"",
            "mixup",
            &["cosface adds its margin to exactly one"],
        ),
        (
            "train",
            "optimizer = \"lamb\"\n[loss]\nsample_share = 0.1",
            "optimizer",
            &["lamb needs whole parameters", "momentum, nesterov or adamw"],
        ),
        (
            "train",
            "label_smoothing = 0.1\n[loss]\nsample_share = 0.1",
            "label_smoothing",
            &["has only some", "give 0"],
        ),
        ("parallel", "mode = \"pipeline\"", "mode", &["data, hybrid"]),
        (
            "parallel",
            "mode = \"semi_auto\"\nmodel = 2\nranks = 2",
            "mode",
            &["SEMI_AUTO_PARALLEL is \"hybrid\""],
        ),
        ("parallel", "mode = \"hybrid_parallel\"", "mode", &["did you mean \"hybrid\"?"]),
        ("parallel", "mode = \"AUTO_PARALLEL\"", "mode", &["did you mean \"auto\"?"]),
        ("parallel", "device = \"gpu\"", "device", &["did you mean \"cuda\"?"]),
        ("parallel", "model = 2\nranks = 2", "model", &["needs parallel.mode = \"hybrid\""]),
        ("parallel", "height = 2\nranks = 2", "height", &["needs parallel.mode"]),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\nheight = 4\nranks = 12",
            "height",
            &["4 x 2", "such as 3"],
        ),
        ("parallel", "shard = [{match = \"fc\", split = \"out\"}]", "shard", &["needs parallel.mode"]),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nmodel = 4\nranks = 6",
            "model",
            &["6 ranks", "such as 3"],
        ),
        ("parallel", "pipeline = 2\nranks = 2", "pipeline", &["needs parallel.mode = \"hybrid\""]),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\npipeline = 4\nranks = 12",
            "pipeline",
            &["pipeline x height x model = 4 x 1 x 2", "such as 3"],
        ),
        (
            "train",
            "global_batch_size = 7\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\nheight = 2\npipeline = 2\nranks = 8",
            "global_batch_size",
            &["2 sets of 4 ranks with the same pictures x 1", "6 or 8"],
        ),
        (
            "data",
            "broken_files = \"skip\"\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\npipeline = 2\nranks = 2",
            "broken_files",
            &["parallel.pipeline"],
        ),
        ("stop", "metric = \"val_loss\"", "patience", &["is missing"]),
        (
            "stop",
            "patience = 3\n[evaluate]\nevery_epochs = 0",
            "patience",
            &["the only validation is at the end"],
        ),
        ("stop", "patience = 3\nmetric = \"val_ema_loss\"", "metric", &["train.ema_decay"]),
        ("data", "folds = 5", "fold", &["1 to 5"]),
        ("data", "folds = 5\nfold = 6", "fold", &["there is no fold 6 of 5"]),
        ("loss", "class_weights = \"even\"", "class_weights", &["\"balanced\"", "even"]),
        ("loss", "class_weights = [1.0, 0.0]", "class_weights", &["is a list"]),
        ("loss", "class_weights = \"balanced\"\nsample_share = 0.1", "class_weights", &["sample_share"]),
        (
            "log",
            "histograms = 100\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\npipeline = 2\nranks = 2",
            "histograms",
            &["parallel.pipeline"],
        ),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nshard = [{match = \"fc\", split = \"out\"}]",
            "shard",
            &["model = 1"],
        ),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\nranks = 2\nshard = [{match = \"f c\", split = \"outt\"}, {matches = \"fc\"}]",
            "shard",
            &["entry 1: match must", "did you mean \"out\"", "entry 2: split must", "called \"matches\""],
        ),
        (
            "parallel",
            "device = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\nranks = 2\nsync_batch_norm = false\n\
             shard = [{match = \"layer1.*\", split = \"out\"}]",
            "sync_batch_norm",
            &["needs true"],
        ),
        (
            "loss",
            "kind = \"arcface\"\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\nranks = 2\n\
             shard = [{match = \"fc\", split = \"in\"}]",
            "kind",
            &["needs whole rows", "split = \"out\""],
        ),
        (
            "train",
            "global_batch_size = 7\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\nheight = 2\nranks = 4",
            "global_batch_size",
            &["2 sets of 2 ranks that share rows x 1", "6 or 8"],
        ),
        (
            "data",
            "broken_files = \"skip\"\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\nheight = 2\nranks = 2",
            "broken_files",
            &["parallel.height"],
        ),
        (
            "recovery",
            "min_ranks = 1\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"",
            "min_ranks",
            &["waits for all"],
        ),
        (
            "log",
            "histograms = 100\n[parallel]\ndevice = \"cpu\"\nmode = \"hybrid\"\nmodel = 2\nranks = 2",
            "histograms",
            &["split"],
        ),
        ("model", "arch = \"resnet-50\"", "arch", &["did you mean \"resnet50\"", "resnet110"]),
        // Unknown keys.
        ("train", "batchsize = 8", "batchsize", &["did you mean \"batch_size\""]),
        ("train", "learning_rate = 0.1", "learning_rate", &["did you mean \"lr\""]),
        ("train", "max_steps = 10", "max_steps", &["did you mean \"steps\""]),
        (
            "parallel",
            "gradient_accumulation_steps = 4",
            "gradient_accumulation_steps",
            &["did you mean \"accumulate\"? It belongs to [train]: write it as train.accumulate"],
        ),
        ("parallel", "zero_stage = 1", "zero_stage", &["did you mean \"optimizer_sharding\"?"]),
        ("train", "fp16 = true", "fp16", &["did you mean \"precision\"?"]),
        (
            "train",
            "gradient_clipping = 1.0",
            "gradient_clipping",
            &["here; Lockstep does not clip gradients"],
        ),
        ("parallel", "recompute = true", "recompute", &["here; Lockstep does not recompute activations"]),
        ("parallel", "device = \"Ascend\"", "device", &["is \"Ascend\"; Ascend devices are not supported"]),
        ("parallel", "mode = \"ddp\"", "mode", &["did you mean \"data\"?"]),
        (
            "parallel",
            "shard = [{match = \"fc\", split = \"RowwiseParallel\"}]",
            "shard",
            &["did you mean \"in\"?"],
        ),
        ("train", "xyzzy = 1", "xyzzy", &["the keys are recipe, epochs, steps"]),
        ("data", "lr = 0.1", "lr", &["belongs to [train]: write it as train.lr"]),
        (
            "data",
            "epoch = 3",
            "epoch",
            &["did you mean \"epochs\"? It belongs to [train]: write it as train.epochs"],
        ),
        // Combinations that cannot work.
        ("train", "epochs = 1\nsteps = 1", "steps", &["not both"]),
        ("train", "batch_size = 1\nglobal_batch_size = 1", "global_batch_size", &["not both"]),
        ("checkpoint", "every_epochs = 1\nevery_steps = 1", "every_steps", &["not both"]),
        (
            "train",
            "global_batch_size = 64\n[parallel]\nranks = 3",
            "global_batch_size",
            &["3 ranks", "63 or 66"],
        ),
        ("train", "precision = \"fp16\"\n[parallel]\ndevice = \"cpu\"", "precision", &["fp32 or bf16"]),
        ("train", "schedule = \"step\"", "milestones", &["such as [30, 60, 80]"]),
        ("data", "mean = [0.5]\nstd = [0.5, 0.5, 0.5]", "std", &["mean has 1"]),
    ] {
        assert_error(&job_with(section, line), &format!("/{section}/{key}"), expected);
    }
    assert_error(&job_with("optimizer", "lr = 1"), "/optimizer", &["belongs to [train]"]);
    assert_error(&job_with("resources", "slots_per_trial = 4"), "/resources", &["parallel.ranks"]);
    for valid in
        ["mode = \"hybrid\"\nheight = 2\nranks = 2", "device = \"cpu\"\n[train]\nprecision = \"bf16\""]
    {
        assert!(from_toml(&job_with("parallel", valid)).is_ok(), "{valid}");
    }
    assert_error("name = \"\"\n[data]\ndataset = \"d\"", "/name", &["1 to 200 characters"]);
    assert_error("name = \"a\\u0007b\"\n[data]\ndataset = \"d\"", "/name", &["control characters"]);
    for (document, pointer) in [
        ("name = \"a\\u200bb\"\n[data]\ndataset = \"d\"", "/name"),
        ("name = \"a\"\n[data]\ndataset = \"d\\ufeff\"", "/data/dataset"),
        ("name = \"a\"\n[data]\ndataset = \"d\"\n[model]\npretrained = \"/w\\u202e\"", "/model/pretrained"),
    ] {
        assert_error(document, pointer, &["invisible characters, has '\\u{"]);
    }
    // The format of weights depends on the file's content, not on its name.
    let weights = "name = \"a\"\n[data]\ndataset = \"d\"\n[model]\npretrained = \"/w/resnet18.pth\"";
    assert!(from_toml(weights).is_ok());
    assert_error("train = 3\n[data]\ndataset = \"d\"", "/train", &["a table of keys"]);
    assert_error("name = \"x\"", "/data/dataset", &["is missing"]);
}

#[test]
fn syntax_errors_name_line_and_column() {
    let found = mistakes("name = \"x\"\n[train\nlr = 1");
    assert!(found[0].detail.starts_with("line 2, column"), "{found:?}");
    let found = mistakes("[train]\nlr = 1\nlr = 2");
    assert!(found[0].detail.starts_with("line 3, column"), "{found:?}");
    for other_format in ["name: x\ntrain:\n  lr: 1\n", "{\"name\": \"x\"}"] {
        let found = mistakes(other_format);
        assert!(found[0].detail.contains("the format is TOML"), "{found:?}");
    }
    assert!(from_json(&json!([1])).is_err_and(|e| e[0].detail.contains("a list")));
}

#[test]
fn settings_from_the_command_line_override_the_file() {
    let mut document = json!({"data": {"dataset": "d"}});
    for argument in ["train.lr=0.5", "name=a plain name", "data.mean=[0.1]", "parallel.sync_batch_norm=false"]
    {
        apply_set(&mut document, argument).expect("applies");
    }
    let spec = from_json(&document).expect("valid");
    assert_eq!(
        (spec.train.lr, spec.name.as_str(), spec.data.mean, spec.parallel.sync_batch_norm),
        (0.5, "a plain name", Some(vec![0.1]), false)
    );
    for argument in ["train.batch_size=8", "train.batch_size=", "train.global_batch_size=64"] {
        apply_set(&mut document, argument).expect("applies");
    }
    let train = from_json(&document).expect("batch_size was removed").train;
    assert_eq!((train.batch_size, train.global_batch_size), (None, Some(64)));
    // A key for text takes the value as it is, also if the value could be a number.
    for (argument, name) in [("name=nan", "nan"), ("name=1e3", "1e3"), ("name='a b'", "a b")] {
        apply_set(&mut document, argument).expect("applies");
        assert_eq!(from_json(&document).expect("valid").name, name);
    }
    let mut tagged = document.clone();
    apply_set(&mut tagged, "tags=[\"a\", 1]").expect("applies");
    assert!(from_json(&tagged).is_err_and(|e| e[0].detail.contains("element 2 is 1, which is not text")));
    assert!(apply_set(&mut document, "train.lr").is_err_and(|e| e.contains("no '='")));
    assert!(apply_set(&mut document, "name.x=1").is_err_and(|e| e.contains("not a table")));
}

#[test]
fn freeze_norm_needs_pretrained_weights() {
    let other_weights = job_with("model", "arch = \"resnet20\"\npretrained = \"resnet18\"");
    assert_error(&other_weights, "/model/pretrained", &["set model.arch = \"resnet18\""]);
    let frozen = |line: &str| job_with("model", &format!("freeze_norm = true\n{line}"));
    assert_error(&frozen(""), "/model/freeze_norm", &["set model.pretrained", "freeze_norm = false"]);
    let spec = from_toml(&frozen("pretrained = \"weights.safetensors\"")).expect("a job");
    assert!(spec.model.freeze_norm);
    assert!(!JobSpec::default().model.freeze_norm);
    assert!(from_toml(&job_with("model", "freeze_norm = false")).is_ok());
}

#[test]
fn histograms_are_off_or_at_least_ten_steps_apart() {
    for steps in [0, 10, 11, 1_000_000_000] {
        let spec = from_toml(&job_with("log", &format!("histograms = {steps}"))).expect("a job");
        assert_eq!(spec.log.histograms, steps);
    }
    for steps in [1, 9] {
        let text = job_with("log", &format!("histograms = {steps}"));
        assert_error(
            &text,
            "/log/histograms",
            &[&format!("{steps} steps are too few"), "give 10 or more, or 0"],
        );
    }
}
