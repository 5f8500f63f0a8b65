//! People, and owners of jobs and datasets.

use lockstep_protocol::people::Person;

/// A person and the hash of the person's password.
#[derive(Clone, PartialEq, Eq)]
pub struct PersonRow {
    pub person: Person,
    /// Argon2id hash as a PHC string; `None` without a password.
    pub hash: Option<String>,
}

/// Does not show the hash, so that it does not appear in logs.
impl std::fmt::Debug for PersonRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.person.fmt(f)
    }
}

impl PersonRow {
    /// The person's principal, which sessions store in place of a token's id. The principal contains a colon, which token ids never
    /// contain.
    pub fn principal(&self) -> String {
        principal(&self.person.name)
    }
}

/// The principal of the person of this name; see [`PersonRow::principal`].
pub(crate) fn principal(name: &str) -> String {
    format!("person:{name}")
}

/// The owner and privacy of a job or a dataset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ownership {
    /// A person's or token's name; `None` without authentication.
    pub owner: Option<String>,
    /// Whether only the owner and admins see the job or dataset.
    pub private: bool,
}
