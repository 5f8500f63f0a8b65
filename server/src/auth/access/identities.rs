//! Accounts at OpenID providers, and the persons they sign in as. An account is identified by its subject, never by a name that the
//! provider sends, because a provider may give a name to another account.

use super::Access;
use crate::store::PersonRow;
use lockstep_protocol::people::Identity;

/// The person as whom an account signs in.
#[derive(Debug)]
pub(crate) enum SignsInAs {
    /// This person, who may be disabled.
    Person(PersonRow),
    /// The account's person was removed.
    Removed,
    /// The account is new: no person has it.
    Nobody,
}

impl Access {
    /// Loads the accounts whose person was removed.
    pub(crate) fn load_refused_identities(&self, refused: Vec<Identity>) {
        self.write().refused_identities.extend(refused);
    }

    /// The person as whom an account signs in.
    pub(crate) fn find_by_identity(&self, identity: &Identity) -> SignsInAs {
        let known = self.read();
        let mut people = known.people.values().map(|known| &known.row);
        match people.find(|row| row.person.identity.as_ref() == Some(identity)) {
            Some(row) => SignsInAs::Person(row.clone()),
            None if known.refused_identities.contains(identity) => SignsInAs::Removed,
            None => SignsInAs::Nobody,
        }
    }
}
