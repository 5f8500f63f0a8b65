//! Limits of input: depths, lengths and counts, in one place. Each limit is far above normal use and far below
//! values that cause problems. Each limit has a test at the limit and a test one beyond it.

/// Maximum number of parts of a key's path; `train.lr` has two.
pub const KEY_PARTS: usize = 8;
/// Maximum length of a key's whole path, in bytes.
pub const KEY_BYTES: usize = 256;
/// Maximum nesting of lists and tables in a TOML document. At each level, a key's path may have [`KEY_PARTS`] parts.
pub const TOML_NESTING: usize = 8;
/// Maximum nesting of lists and objects in a JSON body.
pub const JSON_NESTING: usize = 32;
/// Maximum nesting of lists and maps in a MessagePack message. Lockstep's messages need ten; the library's own limit of 1024
/// would leave little of a thread's stack.
pub const MESSAGE_NESTING: usize = 64;
/// Maximum number of mistakes of a document that are listed; further mistakes are only counted.
pub const MAX_MISTAKES: usize = 100;
/// Maximum length of a text to search for, in characters. Databases limit patterns, too, with less helpful errors.
pub const SEARCH_CHARS: usize = 200;
/// Maximum total length of a message between server and agent, in bytes. The longest messages have pictures to classify: 24 MiB of
/// pictures, a third more as base64.
pub const MESSAGE_BYTES: usize = 64 << 20;
/// Maximum length of a part of a message, in bytes: short enough that heartbeats pass between parts on a slow line.
pub const PART_BYTES: usize = 1 << 20;
/// Maximum number of messages that may be incomplete at the same time.
pub const MAX_PARTIAL_MESSAGES: usize = 8;
/// Maximum length of a class's name, in bytes: the limit of file systems for a folder's name.
pub const CLASS_NAME_BYTES: usize = 255;
/// Maximum total length of the names of a dataset's classes, in bytes. ImageNet-21k's names take 300 kB.
pub const CLASS_NAMES_BYTES: usize = 4 << 20;
/// Maximum length of a picture's name in a shard, in bytes: the limit of systems for a path.
pub const MEMBER_NAME_BYTES: usize = 4096;
/// Maximum length of a text about a broken file of a dataset (its name, or the reason), in characters.
pub const BROKEN_FILE_CHARS: usize = 1000;
/// Maximum length of a project's name, in characters.
pub const PROJECT_CHARS: usize = 100;
/// Maximum number of tags of a job.
pub const MAX_TAGS: usize = 20;
/// Maximum length of a tag, in characters.
pub const TAG_CHARS: usize = 40;
/// Maximum length of a job's notes, in bytes.
pub const NOTES_BYTES: usize = 20_000;
/// Maximum number of tokens that are valid at the same time; the server keeps all in memory. Each agent has its own token.
pub const MAX_TOKENS: usize = 5000;
/// Maximum length of a token's name, in characters.
pub const TOKEN_NAME_CHARS: usize = 100;
/// Maximum number of days until a token expires: a hundred years.
pub const TOKEN_DAYS: u32 = 36_525;
/// Maximum number of browsers that are signed in at the same time; beyond that, the earliest sessions are ended.
pub const MAX_SESSIONS: usize = 10_000;
/// Maximum number of browsers that are signed in with one token at the same time; beyond that, the token's earliest session ends.
pub const MAX_SESSIONS_OF_A_TOKEN: usize = 100;
/// Maximum number of people who may sign in with a password, including disabled people.
pub const MAX_PEOPLE: usize = 1000;
/// Maximum length of a person's name, in characters.
pub const PERSON_NAME_CHARS: usize = 64;
/// Maximum length of the subject of an account at an OpenID provider, in bytes: the limit of the specification.
pub const SUBJECT_BYTES: usize = 255;
/// A password's length, in characters.
pub const PASSWORD_CHARS: std::ops::RangeInclusive<usize> = 10..=1024;
/// Maximum number of GPUs of one machine whose measurements are kept.
pub const MAX_MEASURED_GPUS: usize = 64;
/// Maximum number of findings of one machine that are kept.
pub const MAX_FINDINGS: usize = 20;
/// Maximum length of the text of a finding, in characters.
pub const FINDING_CHARS: usize = 600;
/// Maximum number of machines whose measurements are kept: the machines that were measured last.
pub const MAX_MEASURED_MACHINES: usize = 2048;
/// Maximum number of histograms of one step, of weights and gradients together. ResNet-152 needs 934.
pub const MAX_HISTOGRAM_LAYERS: usize = 1024;
/// The smallest number of steps between two histograms (`log.histograms`): each histogram copies all weights and gradients.
pub const MIN_HISTOGRAM_INTERVAL: u64 = 10;
/// Number of bins of a histogram.
pub const HISTOGRAM_BINS: usize = 64;
/// Maximum number of steps of a job whose histograms are kept; beyond that, histograms are thinned out.
pub const MAX_HISTOGRAM_STEPS: usize = 200;
/// Maximum number of layers in a network's description.
pub const MAX_NETWORK_LAYERS: usize = 4096;
/// Maximum length of a layer's name, in bytes.
pub const LAYER_NAME_BYTES: usize = 200;
/// Maximum length of a text about a plan (its words, or why it was chosen), in bytes: more than the patterns of all strategies together.
pub const PLAN_TEXT_BYTES: usize = 16_384;
/// Maximum length of a checkpoint's `state.json`, in bytes. It is read whole to continue training; usually it has about a kilobyte.
pub const STATE_FILE_BYTES: u64 = 1 << 20;
/// Maximum length of a checkpoint's `MANIFEST.json`, in bytes. For a sharded checkpoint it names at most three files per rank.
pub const MANIFEST_BYTES: usize = 1 << 20;
/// Maximum number of panels of a job or of a project.
pub const MAX_PANELS: usize = 24;
/// Maximum number of metrics of a panel.
pub const MAX_PANEL_METRICS: usize = 6;
/// Maximum length of a panel's title, in characters.
pub const PANEL_TITLE_CHARS: usize = 80;
/// Maximum length of a metric's name, in characters: MLflow's limit.
pub const METRIC_NAME_CHARS: usize = 250;
/// Maximum number of metrics of a run from elsewhere.
pub const MAX_RUN_METRICS: usize = 1000;
/// Maximum length of the id that a program chooses for its run, in characters.
pub const RUN_ID_CHARS: usize = 64;
/// Maximum length of a run's settings as JSON, in bytes; also of its summary, and of its tags with values.
pub const RUN_CONFIG_BYTES: usize = 64 << 10;
/// Maximum number of values of one request that logs a run's records.
pub const MAX_RUN_VALUES: usize = 10_000;
/// Maximum number of files of a run from elsewhere.
pub const MAX_RUN_FILES: usize = 1000;
/// Maximum size of all files of a run together, in bytes.
pub const RUN_FILES_BYTES: u64 = 64 << 30;
/// Maximum length of a file's path within its run, in bytes.
pub const RUN_FILE_PATH_BYTES: usize = 1000;
