//! Limits of input: depths, lengths and counts, in one place. Each is far above what anybody needs and far below what causes
//! trouble, and each has a test at the limit and one past it.

/// Parts of a key's path (`train.lr` has two).
pub const KEY_PARTS: usize = 8;
/// A key's whole path, in bytes.
pub const KEY_BYTES: usize = 256;
/// Lists and tables inside each other in a TOML document. A key's path may have [`KEY_PARTS`] in each.
pub const TOML_NESTING: usize = 8;
/// Lists and objects inside each other in a JSON body.
pub const JSON_NESTING: usize = 32;
/// Lists and maps inside each other in a MessagePack message. Ours need ten; the library's own limit of 1024 leaves
/// little of a thread's stack.
pub const MESSAGE_NESTING: usize = 64;
/// Most mistakes of a document that are listed; the rest is counted.
pub const MISTAKES: usize = 100;
/// A text to search for, in characters. Databases limit patterns, too, with less helpful words.
pub const SEARCH_CHARS: usize = 200;
/// A message between server and agent, all its parts together. Pictures to classify are the longest there are: 24 MiB
/// of them, a third more as base64.
pub const MESSAGE_BYTES: usize = 64 << 20;
/// What of a message goes at once: short enough for heartbeats to come between on a slow line.
pub const PART_BYTES: usize = 1 << 20;
/// Messages of which some parts have come and others not.
pub const UNFINISHED_MESSAGES: usize = 8;
/// A class's name, in bytes: what file systems allow a folder's.
pub const CLASS_NAME_BYTES: usize = 255;
/// The names of a dataset's classes, in bytes together. ImageNet-21k's take 300 kB.
pub const CLASS_NAMES_BYTES: usize = 4 << 20;
/// The name of a picture in a shard, in bytes: what systems allow a path.
pub const MEMBER_NAME_BYTES: usize = 4096;
/// Most characters of the text about a broken file of a dataset: its name, or what is wrong with it.
pub const BROKEN_FILE_CHARS: usize = 1000;
/// A project's name, in characters.
pub const PROJECT_CHARS: usize = 100;
/// Tags of a job.
pub const TAGS: usize = 20;
/// A tag, in characters.
pub const TAG_CHARS: usize = 40;
/// A job's notes, in bytes.
pub const NOTES_BYTES: usize = 20_000;
/// Tokens that are valid at once; every one is kept in the server's memory. Each agent has one of its own.
pub const TOKENS: usize = 5000;
/// A token's name, in characters.
pub const TOKEN_NAME_CHARS: usize = 100;
/// Days until a token expires, at most: a hundred years.
pub const TOKEN_DAYS: u32 = 36_525;
/// Browsers that are signed in at once; of more, those that signed in first are signed out.
pub const SESSIONS: usize = 10_000;
/// Browsers that are signed in with one token at once; of more, its first is signed out.
pub const SESSIONS_OF_A_TOKEN: usize = 100;
/// People who may sign in with a password, also those that are disabled.
pub const PEOPLE: usize = 1000;
/// A person's name, in characters.
pub const PERSON_NAME_CHARS: usize = 64;
/// Length of the subject of an account at an OpenID provider, in bytes; their specification has no longer ones.
pub const SUBJECT_BYTES: usize = 255;
/// A password's length, in characters.
pub const PASSWORD_CHARS: std::ops::RangeInclusive<usize> = 10..=1024;
/// GPUs of one machine whose measurements are kept.
pub const MEASURED_GPUS: usize = 64;
/// Findings of one machine that are kept.
pub const FINDINGS: usize = 20;
/// The text of a finding, in characters.
pub const FINDING_CHARS: usize = 600;
/// Machines whose measurements are kept; of more, those that were measured last.
pub const MEASURED_MACHINES: usize = 2048;
/// Histograms of one step, of weights and gradients together. ResNet-152 has 934 tensors of both.
pub const HISTOGRAM_LAYERS: usize = 1024;
/// Steps between two histograms of a layer (`log.histograms`), at least: each is a copy of all weights and gradients.
pub const HISTOGRAMS_EVERY: u64 = 10;
/// Bins of a histogram.
pub const HISTOGRAM_BINS: usize = 64;
/// Steps of a job whose histograms are kept; of more, they are thinned.
pub const HISTOGRAM_STEPS: usize = 200;
/// Layers of a network's description.
pub const NETWORK_LAYERS: usize = 4096;
/// A layer's name, in bytes.
pub const LAYER_NAME_BYTES: usize = 200;
/// A text about a plan: its words, or why it was chosen. As many as the patterns of all strategies have, and more.
pub const PLAN_TEXT_BYTES: usize = 16_384;
/// `state.json` of a checkpoint, in bytes. Whoever continues from it reads it whole; it has about a kilobyte.
pub const STATE_FILE_BYTES: u64 = 1 << 20;
/// `MANIFEST.json` of a checkpoint, in bytes. Of a sharded one it names at most three files a rank.
pub const MANIFEST_BYTES: usize = 1 << 20;
/// Panels of a job or of a project.
pub const PANELS: usize = 24;
/// Metrics of a panel.
pub const PANEL_METRICS: usize = 6;
/// A panel's title, in characters.
pub const PANEL_TITLE_CHARS: usize = 80;
