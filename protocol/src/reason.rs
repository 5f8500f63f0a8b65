//! Why a job, or one of its attempts, is in its state: a code on which programs may decide, the facts of the code, and
//! an English sentence made of both. Programs must not decide on the sentence.

use serde::{Deserialize, Deserializer, Serialize, de::IgnoredAny};
use std::fmt;
use utoipa::ToSchema;

mod code;
mod words;

pub use code::ReasonCode;
pub use words::undrain;
use words::words;

/// The longest text in a reason, in bytes.
pub const TEXT_BYTES: usize = 2000;

/// The largest number of jobs that a reason names as the jobs for which slots are kept.
const KEPT_FOR: usize = 16;

/// The largest number of machines whose slots a reason names; one more says that there are others.
pub const SLOTS_ON: usize = 8;

/// Facts of a reason; each code has its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Facts {
    /// The rank that failed first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Optimizer steps done at that time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// Ranks of the attempt, if fewer than the job's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
    /// The agent's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<i32>,
    /// Seconds for which something did not happen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Id of another job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Priority of that job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Id of a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Name of a dataset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dataset: Option<String>,
    /// Device of the slots: `cpu` or `cuda`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots_needed: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots_free: Option<u32>,
    /// Number of free slots that are kept for earlier jobs in the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots_kept: Option<u32>,
    /// Names of these jobs, in the order of the queue; a private job's name is empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kept_for: Vec<String>,
    /// Slots of the machine that comes nearest, or of several machines that can share the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots_total: Option<u32>,
    /// Number of machines whose slots are in `slots_total`, if several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machines: Option<u32>,
    /// Slots of each machine that takes the job, if there are several: at most nine, those with the most free slots first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slots_on: Vec<AgentSlots>,
    /// Further details from the place of the event, for a person.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Slots of an agent of the kind that a job needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentSlots {
    /// The agent's name.
    pub agent: String,
    pub free: u32,
    pub total: u32,
}

/// What follows from a reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "does", rename_all = "snake_case")]
pub enum Next {
    /// Another attempt starts; without `from_step`, from the start.
    Restart { attempt: u32, from_step: Option<u64> },
    /// The job waits for slots, and then continues.
    Continue { from_step: Option<u64> },
    /// The job continues when somebody resumes it.
    ContinueWhenResumed { from_step: Option<u64> },
    /// No further attempt starts, because `recovery.max_restarts` allows only this many restarts.
    GiveUp { restarts: u32 },
}

impl fmt::Display for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = |step: &Option<u64>| step.map_or("the start".to_owned(), |step| format!("step {step}"));
        match self {
            Next::Restart { attempt, from_step } => {
                write!(f, "attempt {attempt} starts from {}", from(from_step))
            }
            Next::Continue { from_step } => write!(f, "continues from {}", from(from_step)),
            Next::ContinueWhenResumed { from_step } => {
                write!(f, "continues from {} when resumed", from(from_step))
            }
            Next::GiveUp { restarts: 0 } => f.write_str("no restart is allowed (recovery.max_restarts = 0)"),
            Next::GiveUp { restarts: 1 } => {
                f.write_str("it had been restarted once, as often as recovery.max_restarts allows")
            }
            Next::GiveUp { restarts } => {
                write!(f, "it had been restarted {restarts} times, as often as recovery.max_restarts allows")
            }
        }
    }
}

/// Why a job or an attempt is in its state. The words are made together with the reason, so a reader of another
/// version, which may not know the code, shows the same words.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Reason {
    #[schema(value_type = String, example = "rank_killed")]
    code: ReasonCode,
    // Boxed, so that messages with a reason stay small.
    #[serde(flatten)]
    #[schema(value_type = Facts)]
    facts: Box<Facts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<Next>,
    /// Sentence for a person: `rank 3 was killed by signal 9 at step 1041; attempt 2 starts from step 1000`.
    words: String,
}

impl Reason {
    pub fn new(code: ReasonCode, mut facts: Facts) -> Self {
        facts.shorten();
        let words = words(&code, &facts);
        let mut this = Self { code, facts: Box::new(facts), next: None, words };
        shorten(&mut this.words);
        this
    }

    /// The reason with what follows from it.
    #[must_use]
    pub fn then(mut self, next: Next) -> Self {
        self.words = format!("{}; {next}", self.words);
        shorten(&mut self.words);
        self.next = Some(next);
        self
    }

    pub fn code(&self) -> &ReasonCode {
        &self.code
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    pub fn next(&self) -> Option<&Next> {
        self.next.as_ref()
    }

    /// The sentence for a person.
    pub fn words(&self) -> &str {
        &self.words
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

impl From<ReasonCode> for Reason {
    fn from(code: ReasonCode) -> Self {
        Self::new(code, Facts::default())
    }
}

/// A reason with words but without a code.
impl From<String> for Reason {
    fn from(words: String) -> Self {
        Self::new(ReasonCode::Unspecified, Facts { detail: Some(words), ..Facts::default() })
    }
}

impl From<&str> for Reason {
    fn from(words: &str) -> Self {
        words.to_owned().into()
    }
}

/// Also accepts codes, facts and consequences that this version does not know: a newer server may send them.
impl<'a> Deserialize<'a> for Reason {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Complete {
            code: ReasonCode,
            #[serde(flatten)]
            facts: Facts,
            #[serde(default)]
            next: Option<Known>,
            #[serde(default)]
            words: String,
        }
        /// `None` for a value that this version does not know.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Known {
            Next(Next),
            Unknown(IgnoredAny),
        }
        let Complete { code, mut facts, next, words: mut reported } = Complete::deserialize(from)?;
        facts.shorten();
        shorten(&mut reported);
        if reported.is_empty() {
            reported = words(&code, &facts);
        }
        let next = match next {
            Some(Known::Next(next)) => Some(next),
            Some(Known::Unknown(_)) | None => None,
        };
        Ok(Reason { code, facts: Box::new(facts), next, words: reported })
    }
}

fn shorten(text: &mut String) {
    text.truncate(text.floor_char_boundary(TEXT_BYTES));
}

impl Facts {
    fn shorten(&mut self) {
        let texts = [
            &mut self.agent,
            &mut self.job,
            &mut self.checkpoint,
            &mut self.dataset,
            &mut self.device,
            &mut self.detail,
        ];
        texts.into_iter().flatten().for_each(shorten);
        self.kept_for.truncate(KEPT_FOR);
        self.kept_for.iter_mut().for_each(shorten);
        self.slots_on.truncate(SLOTS_ON + 1);
        self.slots_on.iter_mut().for_each(|on| shorten(&mut on.agent));
    }
}

#[cfg(test)]
mod tests {
    use super::{code::CODE_BYTES, *};

    fn killed() -> Reason {
        let facts = Facts { rank: Some(3), step: Some(1041), signal: Some(9), ..Facts::default() };
        Reason::new(ReasonCode::RankKilled, facts)
    }

    #[test]
    fn words_are_made_of_code_and_facts() {
        let next = Next::Restart { attempt: 2, from_step: Some(1000) };
        let said = killed().then(next.clone());
        assert_eq!(
            said.words(),
            "rank 3 was killed by signal 9 at step 1041; attempt 2 starts from step 1000"
        );
        let json = serde_json::to_value(&said).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"code": "rank_killed", "rank": 3, "step": 1041, "signal": 9, "words": said.words(),
                "next": {"does": "restart", "attempt": 2, "from_step": 1000}})
        );
        assert_eq!(serde_json::from_value::<Reason>(json).unwrap(), said);
    }

    #[test]
    fn what_a_newer_version_wrote_is_read_as_far_as_it_is_known() {
        let read = |text: &str| serde_json::from_str::<Reason>(text).unwrap();
        let newer = read(
            r#"{"code": "moon_phase", "rank": 1, "phase": 0.5, "next": {"does": "wait", "until": 3}, "words": "too dark"}"#,
        );
        assert_eq!((newer.code().as_str(), newer.words()), ("moon_phase", "too dark"));
        assert_eq!((newer.facts().rank, newer.next()), (Some(1), None));
        // An unknown code is kept when the reason is written again.
        assert_eq!(serde_json::to_value(&newer).unwrap()["code"], "moon_phase");
    }

    #[test]
    fn every_code_has_a_name_and_words() {
        for code in ReasonCode::KNOWN {
            assert_eq!(ReasonCode::from(code.as_str()), *code);
            assert!(!Reason::from(code.clone()).words().is_empty(), "{code}");
        }
    }

    #[test]
    fn texts_have_a_limit() {
        let of = |bytes: usize| Reason::from("ä".repeat(bytes / 2));
        assert_eq!(of(TEXT_BYTES).words().len(), TEXT_BYTES);
        assert_eq!(of(TEXT_BYTES + 2).words().len(), TEXT_BYTES);
        let code = |bytes: usize| ReasonCode::from("x".repeat(bytes).as_str()).as_str().len();
        assert_eq!((code(CODE_BYTES), code(CODE_BYTES + 1)), (CODE_BYTES, CODE_BYTES));
        let kept_for = |jobs: usize| {
            let facts = Facts { kept_for: vec!["a".into(); jobs], ..Facts::default() };
            Reason::new(ReasonCode::WaitingForSlots, facts).facts().kept_for.len()
        };
        assert_eq!((kept_for(KEPT_FOR), kept_for(KEPT_FOR + 1)), (KEPT_FOR, KEPT_FOR));
        let long = format!(
            r#"{{"code": "stalled", "words": "{}", "agent": "{}"}}"#,
            "w".repeat(3000),
            "a".repeat(3000)
        );
        let read: Reason = serde_json::from_str(&long).unwrap();
        assert_eq!(
            (read.words().len(), read.facts().agent.as_ref().unwrap().len()),
            (TEXT_BYTES, TEXT_BYTES)
        );
    }
}
