//! The names of other programs (MindSpore, PyTorch, DeepSpeed, Megatron-LM, Determined) for keys and values. An error for an unknown name
//! suggests the equivalent name here, or says that there is none, rather than a name with a similar spelling.

use super::{Device, OptimizerKind, Precision, Split, shard::MODES};

/// Names of keys, in lower case, and the path of the equivalent key.
const KEYS: &[(&[&str], &str)] = &[
    (&["learning_rate"], "train.lr"),
    (&["num_epochs", "max_epochs"], "train.epochs"),
    (&["max_steps", "num_steps"], "train.steps"),
    (&["micro_batch_size", "per_device_train_batch_size"], "train.batch_size"),
    (
        &["gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accum_steps"],
        "train.accumulate",
    ),
    (&["amp_level", "amp", "mixed_precision", "fp16", "bf16"], "train.precision"),
    (&["wd"], "train.weight_decay"),
    (&["lr_scheduler"], "train.schedule"),
    (&["drop_last"], "data.drop_remainder"),
    (&["parallel_mode", "strategy"], "parallel.mode"),
    (&["device_num", "world_size", "nproc_per_node", "slots_per_trial", "num_gpus"], "parallel.ranks"),
    (&["tp", "tp_size", "tensor_parallel", "tensor_model_parallel_size"], "parallel.model"),
    (
        &["pp", "pp_size", "num_stages", "pipeline_stages", "pipeline_model_parallel_size"],
        "parallel.pipeline",
    ),
    (&["dataset_strategy"], "parallel.height"),
    (
        &["zero", "zero_stage", "enable_parallel_optimizer", "use_distributed_optimizer"],
        "parallel.optimizer_sharding",
    ),
    (&["save_checkpoint_steps"], "checkpoint.every_steps"),
    (&["keep_checkpoint_max"], "checkpoint.keep"),
    (&["min_checkpoint_period"], "checkpoint.every_epochs"),
    (&["min_validation_period"], "evaluate.every_epochs"),
    (&["run_cap"], "sweep.max_trials"),
    (&["max_concurrent_trials"], "sweep.max_concurrent"),
    (&["divisor"], "sweep.reduction"),
    (&["max_rungs"], "sweep.rungs"),
];

/// Names of keys, in lower case, without one equivalent key, and advice.
const ADVICE: &[(&[&str], &str)] = &[
    (&["resources"], "use parallel.ranks for the number of slots, and priority (outside all sections)"),
    (
        &[
            "gradient_clipping",
            "gradient_clip_val",
            "gradient_clip",
            "grad_clip",
            "clip_grad",
            "clip_grad_norm",
            "clip_gradients",
            "max_grad_norm",
        ],
        "Lockstep does not clip gradients; a lower train.lr or train.warmup_epochs can prevent large steps",
    ),
    (
        &["recompute", "gradient_checkpointing", "activation_checkpointing"],
        "Lockstep does not recompute activations; a smaller train.batch_size with train.accumulate saves memory",
    ),
    (
        &["fsdp", "fully_sharded"],
        "weights are not divided over ranks as in FSDP; parallel.optimizer_sharding = true divides the optimizer's state",
    ),
    (&["num_classes"], "the number of classes comes from the dataset"),
    (&["shuffle"], "training pictures are always shuffled, in an order that train.seed determines"),
    (
        &["num_workers", "num_parallel_workers", "dataloader_num_workers"],
        "the number of threads that prepare pictures is chosen automatically",
    ),
];

/// Names of values: the valid words of the key, the names in lower case, and the suggestion.
const WORDS: &[(&[&str], &[&str], &str)] = &[
    (
        &OptimizerKind::NAMES,
        &["sgd"],
        "\"momentum\" is SGD with momentum, and plain SGD with train.momentum = 0",
    ),
    (&MODES, &["semi_auto", "semi_auto_parallel"], "MindSpore's SEMI_AUTO_PARALLEL is \"hybrid\" here"),
    (&MODES, &["ddp"], "did you mean \"data\"?"),
    (
        &MODES,
        &["fsdp", "zero"],
        "weights are not divided over ranks as in FSDP: mode \"data\" with parallel.optimizer_sharding = true divides the optimizer's \
         state",
    ),
    (
        &MODES,
        &["pipeline", "pipeline_parallel", "pp"],
        "pipeline parallelism is \"hybrid\" here, with parallel.pipeline = the number of stages",
    ),
    (
        &MODES,
        &["tensor", "tensor_parallel", "model_parallel", "tp"],
        "tensor parallelism is \"hybrid\" here, with parallel.model = the number of ranks that share a copy of the network",
    ),
    (&Split::NAMES, &["colwiseparallel", "colwise", "column"], "did you mean \"out\"?"),
    (&Split::NAMES, &["rowwiseparallel", "rowwise", "row"], "did you mean \"in\"?"),
    (
        &Split::NAMES,
        &["shard(0)", "shard(1)"],
        "Shard(0) of a layer's weights is \"out\" here, and Shard(1) is \"in\"",
    ),
    (&Precision::NAMES, &["float16", "half"], "did you mean \"fp16\"?"),
    (&Precision::NAMES, &["bfloat16"], "did you mean \"bf16\"?"),
    (&Device::NAMES, &["gpu"], "did you mean \"cuda\"?"),
    (&Device::NAMES, &["ascend", "npu"], "Ascend devices are not supported"),
];

/// Returns the section and the key that are equivalent to another program's name of a key.
pub(super) fn equivalent_key(name: &str) -> Option<(&'static str, &'static str)> {
    find(KEYS, name)?.split_once('.')
}

/// Returns the advice for another program's name of a key if no key is equivalent.
pub(super) fn key_advice(name: &str) -> Option<&'static str> {
    find(ADVICE, name)
}

fn find(table: &[(&[&str], &'static str)], name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    table.iter().find(|(names, _)| names.contains(&name.as_str())).map(|(_, meaning)| *meaning)
}

/// Returns the suggestion for another program's name of a value of the key with these `words`.
pub(super) fn word_suggestion(words: &[&str], name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let found = WORDS.iter().find(|(valid, names, _)| *valid == words && names.contains(&name.as_str()));
    found.map(|(_, _, suggestion)| *suggestion)
}
