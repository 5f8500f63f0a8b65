//! Enums whose values are words in specifications, messages and the database.

/// Gives an enum the constants `ALL` and `NAMES` and the method `name`. The names must equal serde's names. The test below
/// compares them: add each new enum to the list in the test.
macro_rules! named {
    ($kind:ident: $($variant:ident = $name:literal),+ $(,)?) => {
        impl $kind {
            /// Every value with its name in a specification.
            pub const ALL: [($kind, &'static str); [$($name),+].len()] = [$(($kind::$variant, $name)),+];

            /// Only the names, in the same order.
            pub const NAMES: [&'static str; [$($name),+].len()] = [$($name),+];

            /// Name in a specification.
            pub fn name(self) -> &'static str {
                match self {
                    $($kind::$variant => $name),+
                }
            }
        }
    };
}

pub(super) use named;

/// Gives an enum the constant `ALL`, the method `as_str`, `Display` and `FromStr`. `$noun` names the enum in the error for an unknown word.
/// As for `named`, the words must equal serde's names.
#[macro_export]
macro_rules! words {
    ($kind:ident, $noun:literal: $($variant:ident = $word:literal),+ $(,)?) => {
        impl $kind {
            /// Every value.
            pub const ALL: [$kind; [$($word),+].len()] = [$($kind::$variant),+];

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
                    let words = [$($word),+].join(", ");
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
        spec::{Arch, LossKind, OptimizerKind, Recipe, ScheduleKind, Split, Stem},
        sweep::SweepState,
    };
    use serde_json::{from_value, json};

    #[test]
    fn names_are_those_that_serde_writes_and_reads() {
        macro_rules! compare {
            ($($kind:ident),+) => {
                $(for ((value, name), listed) in std::iter::zip($kind::ALL, $kind::NAMES) {
                    assert_eq!((json!(value), value.name()), (json!(name), listed));
                    assert_eq!(from_value::<$kind>(json!(name)).unwrap(), value);
                })+
            };
        }
        compare!(Arch, Stem, OptimizerKind, ScheduleKind, Recipe, Split, LossKind);
        macro_rules! compare_words {
            ($($kind:ident),+) => {
                $(for value in $kind::ALL {
                    assert_eq!((json!(value), Ok(value)), (json!(value.as_str()), value.as_str().parse::<$kind>()));
                })+
            };
        }
        compare_words!(Scope, Role, JobState, AttemptState, SweepState, HistogramKind);
        let error = "root".parse::<Role>().unwrap_err();
        assert_eq!(error, "no role is called \"root\"; the roles are viewer, member, admin");
    }
}
