//! Enums whose values are words in specifications, messages and the database.

/// Defines an enum whose values have words: serde, `as_str`, `Display` and `FromStr` use the word of a value. The text after the enum's name
/// is a noun for its values, which the error for an unknown word contains. Also defines the constants `ALL` and `NAMES`.
#[macro_export]
macro_rules! words {
    (
        $(#[$($attribute:tt)*])*
        pub enum $kind:ident: $noun:literal {
            $($(#[$($value_attribute:tt)*])* $value:ident = $word:tt),+ $(,)?
        }
    ) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $(#[$($attribute)*])*
        pub enum $kind {
            $($(#[$($value_attribute)*])* #[serde(rename = $word)] $value),+
        }

        impl $kind {
            /// Every value.
            pub const ALL: [$kind; [$($word),+].len()] = [$($kind::$value),+];

            /// The word of every value, in the same order.
            pub const NAMES: [&'static str; [$($word),+].len()] = [$($word),+];

            /// The word used in SQL, JSON, on pages and on the command line.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($kind::$value => $word),+
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
    use crate::people::Role;

    #[test]
    fn an_unknown_word_is_refused_with_all_words() {
        let error = "root".parse::<Role>().unwrap_err();
        assert_eq!(error, "no role is called \"root\"; the roles are viewer, member, admin");
    }
}
