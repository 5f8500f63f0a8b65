//! People, in memory like tokens. Any change of a person ends the person's sessions. The person's tokens allow at most the person's role,
//! and nothing while the person is disabled.

use super::{
    Access, Known,
    caller::{Credential, Usage},
    passwords::{Password, PasswordError},
};
use crate::store::{PersonRow, principal};
use lockstep_protocol::{
    access::{Scope, Token},
    people::{Identity, Person, name_mistake, password_mistake},
};
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// A person, and the credential of the person's sessions.
#[derive(Debug)]
pub(super) struct KnownPerson {
    pub(super) row: PersonRow,
    pub(super) credential: Arc<Credential>,
}

/// Why a sign-in failed.
#[derive(Debug)]
pub(crate) enum NotSignedIn {
    /// The name or the password is wrong, or the person is disabled. The response does not reveal which.
    Wrong,
    /// Too many attempts have failed. The field is the time to wait.
    TooOften(Duration),
    /// The password could not be checked.
    NotChecked(PasswordError),
}

/// The person as whom an account at an OpenID provider signs in. An account is identified by its subject, never by a name that the provider
/// sends, because a provider may give a name to another account.
#[derive(Debug)]
pub(crate) enum SignsInAs {
    /// This person, who may be disabled.
    Person(PersonRow),
    /// The account's person was removed.
    Removed,
    /// The account is new: no person has it.
    Nobody,
}

impl Known {
    /// The credential that a session uses. `id`: a token's id, or a person's id (`principal`).
    pub(super) fn session_credential(&self, id: &str) -> Option<Arc<Credential>> {
        let person = id.strip_prefix(principal("").as_str()).and_then(|name| self.people.get(name));
        match person {
            Some(person) => Some(person.credential.clone()),
            None => self.token_with_id(id).cloned(),
        }
    }

    pub(super) fn token_with_id(&self, id: &str) -> Option<&Arc<Credential>> {
        self.tokens.values().find(|c| c.token.id == id)
    }

    /// A token's scope, limited by its owner's role if a person owns it. `None` while the owner is disabled or removed.
    pub(super) fn scope_of(&self, token: &Token) -> Option<Scope> {
        let Some(owner) = &token.owner else { return Some(token.scope) };
        let person = self.people.get(owner).map(|known| &known.row.person)?;
        person.disabled_at.is_none().then(|| token.scope.at_most(person.role.scope()))
    }

    /// Updates a person's tokens after a change of the person. Connections of a token whose scope has changed are closed.
    fn renew_tokens_of(&mut self, owner: &str) {
        let of_owner = |c: &&Arc<Credential>| c.token.owner.as_deref() == Some(owner);
        for old in self.tokens.values().filter(of_owner).cloned().collect::<Vec<_>>() {
            let scope = self.scope_of(&old.token);
            if scope != old.scope {
                old.ended.cancel();
                let ended = CancellationToken::new();
                if scope.is_none() || !old.token.is_valid(crate::now()) {
                    ended.cancel();
                }
                let renewed = Credential { scope, ended, ..Credential::clone(&old) };
                self.tokens.insert(old.hash.clone(), Arc::new(renewed));
            }
        }
    }
}

impl Access {
    /// Adds a person, or replaces the person with the same name, whose sessions are ended.
    pub(crate) fn put_person(&self, row: PersonRow) {
        let name = row.person.name.clone();
        // Represented as a token, so that code that names a caller or checks its scope handles people and tokens alike.
        let (scope, at) = (row.person.role.scope(), row.person.created_at);
        let token =
            Token { owner: Some(name.clone()), ..Token::of(row.principal(), name.clone(), scope, at) };
        let ended = CancellationToken::new();
        if row.person.disabled_at.is_some() {
            ended.cancel();
        }
        let credential = Credential {
            scope: Some(token.scope),
            usage: Usage::of(&token),
            token,
            hash: String::new(),
            session_since: None,
            expires_at: None,
            ended,
        };
        let mut known = self.write();
        if let Some(identity) = &row.person.identity {
            known.refused_identities.remove(identity);
        }
        let person = KnownPerson { row, credential: Arc::new(credential) };
        if let Some(old) = known.people.insert(name.clone(), person) {
            old.credential.ended.cancel();
        }
        known.renew_tokens_of(&name);
        // Ends the sessions of the person and of the person's tokens.
        known.sessions.retain(|_, session| {
            let is_of_person = session.token.owner.as_deref() == Some(name.as_str());
            if is_of_person {
                session.ended.cancel();
            }
            !is_of_person
        });
        let tokens = known.tokens.values().filter(|c| c.token.owner.as_deref() == Some(name.as_str()));
        tokens.for_each(|c| self.codes.forget(&c.token.id));
        self.codes.forget(&principal(&name));
    }

    /// Removes a person, ends the person's sessions, and revokes the person's tokens.
    pub(crate) fn remove_person(&self, name: &str) {
        let mut known = self.write();
        if let Some(old) = known.people.remove(name) {
            old.credential.ended.cancel();
            known.refused_identities.extend(old.row.person.identity);
        }
        let of_owner = known.tokens.values().filter(|c| c.token.owner.as_deref() == Some(name));
        let tokens: Vec<_> = of_owner.map(|c| c.row()).collect();
        drop(known);
        for mut row in tokens {
            row.token.revoked_at.get_or_insert_with(crate::now);
            self.put_token(row);
        }
        self.codes.forget(&principal(name));
    }

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

    /// The stored row of a person.
    pub(crate) fn person(&self, name: &str) -> Option<PersonRow> {
        self.read().people.get(name).map(|known| known.row.clone())
    }

    /// All people, by name.
    pub(crate) fn people(&self) -> Vec<Person> {
        self.read().people.values().map(|known| known.row.person.clone()).collect()
    }

    /// Whether the server has people. Only then are changes of jobs and datasets restricted to their owners.
    pub(crate) fn has_people(&self) -> bool {
        !self.read().people.is_empty()
    }

    /// Returns the person with this name and password, and counts the attempt. A failure takes as long whether or not the person exists.
    pub(crate) async fn authenticate_password(
        &self,
        name: &str,
        password: Password,
        from: IpAddr,
    ) -> Result<PersonRow, NotSignedIn> {
        // All invalid names share one counter, so that they cannot fill the memory.
        let counted = if name_mistake(name).is_none() { name } else { "" };
        let is_familiar =
            self.attempts.count_password_attempt(counted, from).map_err(NotSignedIn::TooOften)?;
        if password_mistake(&password.0).is_some() {
            return Err(NotSignedIn::Wrong);
        }
        let row = self.person(name).filter(|row| row.person.disabled_at.is_none());
        let hash = row.as_ref().and_then(|row| row.hash.clone());
        match self.passwords.verify(password, hash, is_familiar).await {
            Ok(true) => {}
            Ok(false) => return Err(NotSignedIn::Wrong),
            Err(error) => {
                self.attempts.uncount_password_attempt(counted, from);
                return Err(NotSignedIn::NotChecked(error));
            }
        }
        self.attempts.note_success(counted, from);
        row.ok_or(NotSignedIn::Wrong)
    }
}
