//! Enums whose values are names in a specification.

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

#[cfg(test)]
mod tests {
    use crate::spec::{Arch, LossKind, OptimizerKind, Recipe, Split, Stem};
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
        compare!(Arch, Stem, OptimizerKind, Recipe, Split, LossKind);
    }
}
