//! Enums whose values are words in specifications, messages and the database.

/// Gives an enum the constants `ALL` and `NAMES`, the method `as_str`, `Display` and `FromStr`. `$noun` names the enum in the error for an
/// unknown word. The words must equal serde's names. The test in this file compares them: add each new enum to its list.
#[macro_export]
macro_rules! words {
    ($kind:ident, $noun:literal: $($variant:ident = $word:literal),+ $(,)?) => {
        impl $kind {
            /// Every value.
            pub const ALL: [$kind; [$($word),+].len()] = [$($kind::$variant),+];

            /// The word of every value, in the same order.
            pub const NAMES: [&'static str; [$($word),+].len()] = [$($word),+];

            /// The word used in SQL, JSON, on pages and on the command line.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($kind::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = $kind::ALL.into_iter().find(|value| value.as_str() == text);
                found.ok_or_else(|| {
                    let words = $kind::NAMES.join(", ");
                    format!("no {0} is called {text:?}; the {0}s are {words}", $noun)
                })
            }
        }
    };
}

pub(crate) use words;

#[cfg(test)]
mod tests {
    use crate::{
        access::Scope,
        attempt::AttemptState,
        histograms::HistogramKind,
        job::JobState,
        people::Role,
        spec::{
            Arch, Augment, BrokenFiles, Device, LossKind, OptimizerKind, Precision, Recipe, ScheduleKind,
            Split, Stem,
        },
        sweep::SweepState,
    };
    use serde_json::{from_value, json};

    #[test]
    fn names_are_those_that_serde_writes_and_reads() {
        macro_rules! compare {
            ($($kind:ident),+) => {
                $(for value in $kind::ALL {
                    let word = value.as_str();
                    assert_eq!((json!(value), word.parse::<$kind>()), (json!(word), Ok(value)));
                    assert_eq!(from_value::<$kind>(json!(word)).unwrap(), value);
                })+
            };
        }
        compare!(Scope, Role, JobState, AttemptState, SweepState, HistogramKind);
        compare!(Arch, Stem, OptimizerKind, ScheduleKind, Recipe, Split, LossKind);
        compare!(Device, Augment, BrokenFiles, Precision);
        let error = "root".parse::<Role>().unwrap_err();
        assert_eq!(error, "no role is called \"root\"; the roles are viewer, member, admin");
    }
}
