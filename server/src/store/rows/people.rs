//! People, and whose a job or a dataset is.

use lockstep_protocol::people::Person;

/// A person and the hash of the password, if it has one.
#[derive(Clone, PartialEq, Eq)]
pub struct PersonRow {
    /// As it is shown.
    pub person: Person,
    /// Argon2id, as a PHC string.
    pub hash: Option<String>,
}

/// A hash is in no log.
impl std::fmt::Debug for PersonRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.person.fmt(f)
    }
}

impl PersonRow {
    /// What a session of the person stands for, in the place of a token's id. No token's id has a colon.
    pub fn principal(&self) -> String {
        principal(&self.person.name)
    }
}

/// As [`PersonRow::principal`].
pub(crate) fn principal(name: &str) -> String {
    format!("person:{name}")
}

/// Whose a job or a dataset is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned {
    /// A person's or a token's name; none where nobody is asked who they are.
    pub owner: Option<String>,
    /// Seen by its owner and admins alone.
    pub private: bool,
}
