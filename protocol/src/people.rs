//! People who sign in with a password or an OpenID account, and what each role allows.

use crate::{
    access::Scope,
    limits::{PASSWORD_CHARS, PERSON_NAME_CHARS, SUBJECT_BYTES},
    spec::named::words,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

words! {
    /// The rights of a person. Each role includes the roles before it.
    #[derive(PartialOrd, Ord, Hash, ToSchema)]
    pub enum Role: "role" {
        /// Read everything except other owners' private jobs, sweeps, datasets and models.
        Viewer = "viewer",
        /// Submit jobs and register datasets; change and delete one's own jobs and datasets.
        Member = "member",
        /// Change everything; manage people, tokens and machines; read the audit log.
        Admin = "admin",
    }
}

impl Role {
    /// The scope of a token that may do the same.
    pub fn scope(self) -> Scope {
        match self {
            Role::Viewer => Scope::Read,
            Role::Member => Scope::Submit,
            Role::Admin => Scope::Admin,
        }
    }
}

/// A person, without the password's hash. Times are RFC 3339 UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Person {
    /// Unique name, which also appears in the audit log and on the person's jobs.
    pub name: String,
    pub role: Role,
    pub created_at: jiff::Timestamp,
    /// Time since which the person may not sign in; absent if the person may sign in.
    pub disabled_at: Option<jiff::Timestamp>,
    /// The account at an OpenID provider that signs in as the person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
}

/// An account at an OpenID provider. A provider never assigns a subject to another account, unlike a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// The provider's address, exactly as in its ID tokens.
    pub issuer: String,
    /// The claim `sub`.
    pub subject: String,
}

/// Why a text cannot be a person's name; `None` if it can. Upper case is not allowed, so that no two names
/// differ only in case.
pub fn name_mistake(name: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let chars = name.chars().count();
    let found = match name.chars().find(|c| !is_plain(*c) && !".-_@".contains(*c)) {
        _ if name.is_empty() => "this one is empty".to_owned(),
        Some(odd) => format!("this one has {odd:?}"),
        None if chars > PERSON_NAME_CHARS => format!("this one has {chars}"),
        None if !name.starts_with(is_plain) => "this one begins with another character".to_owned(),
        None => return None,
    };
    Some(format!(
        "must have 1 to {PERSON_NAME_CHARS} characters, each a lower-case letter (a to z), a digit, '.', '-', '_' or '@', \
         the first a letter or a digit: {found}"
    ))
}

/// Why a text cannot be the subject of an account at an OpenID provider; `None` if it can.
pub fn subject_mistake(subject: &str) -> Option<String> {
    let found = match subject.chars().find(|c| !c.is_ascii_graphic() && *c != ' ') {
        Some(odd) => format!("this one has {odd:?}"),
        None if (1..=SUBJECT_BYTES).contains(&subject.len()) => return None,
        None => format!("this one has {}", subject.len()),
    };
    Some(format!("must have 1 to {SUBJECT_BYTES} printable ASCII characters: {found}"))
}

/// Why a text cannot be a password; `None` if it can. The sentence does not contain the text.
pub fn password_mistake(password: &str) -> Option<String> {
    let chars = password.chars().count();
    let (least, most) = (PASSWORD_CHARS.start(), PASSWORD_CHARS.end());
    (!PASSWORD_CHARS.contains(&chars))
        .then(|| format!("must have {least} to {most} characters; this one has {chars}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_includes_earlier_roles() {
        for (n, role) in Role::ALL.into_iter().enumerate() {
            for (m, other) in Role::ALL.into_iter().enumerate() {
                assert_eq!(role.scope().allows(other.scope()), n >= m, "{role} {other}");
            }
            assert!(!role.scope().allows(Scope::Agent));
        }
    }

    #[test]
    fn names_have_plain_characters_and_a_maximum_length() {
        let longest = "a".repeat(PERSON_NAME_CHARS);
        for good in ["a", "7", "ada.lovelace-2_x", "ada@example.org", &longest] {
            assert_eq!(name_mistake(good), None, "{good}");
        }
        for bad in
            ["", "Ada", "a b", ".a", "-a", "@a", "a/b", "ä", "a\n", "a\u{202e}", &format!("{longest}a")]
        {
            assert!(name_mistake(bad).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn subjects_are_ascii_and_have_a_maximum_length() {
        let longest = "a".repeat(SUBJECT_BYTES);
        for good in ["1", "248289761001", "auth0|5f7c", "a b", &longest] {
            assert_eq!(subject_mistake(good), None, "{good}");
        }
        let too_long = format!("{longest}a");
        for (bad, is) in
            [("", "has 0"), ("a\n", r"has '\n'"), ("ä", "has 'ä'"), (too_long.as_str(), "has 256")]
        {
            assert!(subject_mistake(bad).unwrap().ends_with(is), "{bad:?}");
        }
    }
}
