//! Enums whose values are words in specifications, messages and the database.

/// Gives an enum the constants `ALL` and `NAMES` and the method `name`. The names must equal serde's; the test below
/// compares them, so add each new enum to its list.
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

/// Gives an enum the constant `ALL`, the method `as_str` and `Display`. As for `named`, the words must equal serde's.
#[macro_export]
macro_rules! words {
    ($kind:ident: $($variant:ident = $word:literal),+ $(,)?) => {
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
    use serde_json::json;

    #[test]
    fn names_are_those_that_serde_writes() {
        macro_rules! compare {
            ($($kind:ident),+) => {
                $(for ((value, name), listed) in std::iter::zip($kind::ALL, $kind::NAMES) {
                    assert_eq!((json!(value), value.name()), (json!(name), listed));
                })+
            };
        }
        compare!(Arch, Stem, OptimizerKind, ScheduleKind, Recipe, Split, LossKind);
        macro_rules! compare_words {
            ($($kind:ident),+) => {
                $(for value in $kind::ALL {
                    assert_eq!(json!(value), value.as_str());
                })+
            };
        }
        compare_words!(Scope, Role, JobState, AttemptState, SweepState, HistogramKind);
    }
}
