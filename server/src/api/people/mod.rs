//! People: add, list, change and remove people, and change one's own password.

pub(crate) mod audit;
pub(crate) mod login;
pub(crate) mod oidc;
pub(crate) mod pages;
pub(crate) mod tokens;

use super::list::{List, ListParams, list_of};
use crate::api::prelude::*;
use crate::{
    auth::{
        Auth,
        access::{NotSignedIn, Password, PasswordError, SignsInAs},
    },
    http::{authorize::AuditSubject, extract::Body, peer::Peer},
    store::PersonRow,
};
use lockstep_protocol::{
    limits::MAX_PEOPLE,
    people::{Identity, Person, Role, name_mistake, password_mistake, subject_mistake},
};
use serde_json::json;
use std::{net::IpAddr, time::Duration};

/// A person to add.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPerson {
    /// The person's name: 1 to 64 characters, each a to z, a digit, `.`, `-`, `_` or `@`.
    pub(super) name: String,
    pub(super) role: Role,
    /// The person's password, 10 to 1024 characters. Optional with `subject`.
    #[schema(value_type = Option<String>)]
    pub(super) password: Option<Password>,
    /// Claim `sub` of the person's account at the OpenID provider (`serve --oidc-issuer`).
    pub(super) subject: Option<String>,
}

/// Changes to a person. Absent fields stay unchanged. Any change ends the person's sessions.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PersonChange {
    pub(super) role: Option<Role>,
    /// Whether the person is disabled and can neither sign in nor use tokens.
    pub(super) disabled: Option<bool>,
    /// The new password, 10 to 1024 characters.
    #[schema(value_type = Option<String>)]
    pub(super) password: Option<Password>,
    /// Claim `sub` of the person's new account at the OpenID provider; empty for no account.
    pub(super) subject: Option<String>,
}

list_of! {
    /// A page of people.
    PersonList
    /// Ordered by name, unless `sort` is given.
    people: Person
}

const LIST: List<Person> = List {
    name: "people",
    sorts: &[
        ("name", |person| person.name.as_str().into()),
        ("role", |person| person.role.as_str().into()),
        ("created", |person| person.created_at.into()),
    ],
    default_sort: "name",
    id: |person| &person.name,
    created: Some(|person| person.created_at),
};

/// A change of one's own password.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OwnPassword {
    #[schema(value_type = String)]
    pub(super) current: Password,
    /// The new password, 10 to 1024 characters.
    #[schema(value_type = String)]
    pub(super) new: Password,
}

impl From<PasswordError> for Error {
    fn from(error: PasswordError) -> Self {
        match error {
            PasswordError::Busy => {
                Error::Unavailable("too many passwords are being checked; try again".into())
            }
            PasswordError::Failed(detail) => {
                Error::Internal(format!("a password cannot be hashed: {detail}"))
            }
        }
    }
}

/// List people
///
/// `sort`: `name`, `role`, `created`.
#[utoipa::path(get, path = "/people", tag = "access", params(ListParams), responses((status = 200, body = PersonList)))]
pub(crate) async fn list(
    State(auth): State<Arc<Auth>>,
    Query(params): Query<ListParams>,
) -> Result<Json<PersonList>> {
    Ok(Json(LIST.page(None, auth.access.people(), &params)?.into()))
}

/// Add a person
///
/// The person signs in at `/login`. Once the server has people, only owners and admins may change jobs and datasets; see `owner`.
#[utoipa::path(post, path = "/people", tag = "access", request_body = NewPerson,
    responses((status = 201, body = Person), (status = 409, body = Problem, description = "The name is taken, there are 1000 people, or the server runs without authentication")))]
pub(crate) async fn create(
    State(auth): State<Arc<Auth>>,
    Body(new, _): Body<NewPerson>,
) -> Result<(StatusCode, Extension<AuditSubject>, Json<Person>)> {
    let must_be_first_person = false;
    let person = add(&auth, new, must_be_first_person).await?.person;
    Ok((StatusCode::CREATED, Extension(AuditSubject(person.name.clone())), Json(person)))
}

/// Adds a person. With `must_be_first_person`, fails if the server already has people.
pub(super) async fn add(auth: &Auth, new: NewPerson, must_be_first_person: bool) -> Result<PersonRow> {
    let conflict = |detail: String| Err(Error::Conflict(detail));
    if !auth.access.must_authenticate {
        return conflict(
            "this server runs with --no-auth, so it has no people; start it without --no-auth".into(),
        );
    }
    check_field("/name", name_mistake(&new.name))?;
    let identity = new.subject.as_deref().map(|subject| identity(auth, subject)).transpose()?;
    let hash = match new.password {
        Some(password) => {
            check_field("/password", password_mistake(&password.0))?;
            Some(auth.access.passwords.hash(password).await?)
        }
        None if identity.is_some() => None,
        None => return Err(Error::invalid("/password", "is missing; give a password or a subject")),
    };
    let _one_at_a_time = auth.access.change_lock.lock().await;
    if must_be_first_person && auth.access.has_people() {
        return conflict(
            "somebody else has been added meanwhile; sign in as an admin to add more people".into(),
        );
    }
    check_can_add(auth, &new.name, identity.as_ref())?;
    insert(auth, new.name, new.role, hash, identity).await
}

/// Checks that nobody has the name or the account, and that the maximum number of people is not reached.
pub(super) fn check_can_add(auth: &Auth, name: &str, identity: Option<&Identity>) -> Result<()> {
    let conflict = |detail: String| Err(Error::Conflict(detail));
    let people = auth.access.people();
    if people.iter().any(|person| person.name == name) {
        return conflict(format!("the name {name:?} is taken; choose another"));
    }
    if people.len() >= MAX_PEOPLE {
        return conflict(format!("there are already {MAX_PEOPLE} people, the maximum; remove people first"));
    }
    identity.map_or(Ok(()), |identity| check_account(auth, name, identity))
}

/// Checks that an account is not bound to another person.
fn check_account(auth: &Auth, name: &str, identity: &Identity) -> Result<()> {
    match auth.access.find_by_identity(identity) {
        SignsInAs::Person(row) if row.person.name != name => {
            let other = row.person.name;
            let detail = format!(
                "the account already signs in as {other:?}; unlink it first (`lockstep user unlink {other}`)"
            );
            Err(Error::Conflict(detail))
        }
        _ => Ok(()),
    }
}

/// Stores a new person after [`check_can_add`]. The caller must hold `change_lock`.
pub(super) async fn insert(
    auth: &Auth,
    name: String,
    role: Role,
    hash: Option<String>,
    identity: Option<Identity>,
) -> Result<PersonRow> {
    let person = Person { name, role, created_at: crate::now(), disabled_at: None, identity };
    let row = PersonRow { person, hash };
    auth.store.put_person(&row).await?;
    auth.access.put_person(row.clone());
    Ok(row)
}

/// Returns the account with this subject at the server's OpenID provider.
fn identity(auth: &Auth, subject: &str) -> Result<Identity> {
    let Some(oidc) = &auth.oidc else {
        let detail = "this server has no OpenID provider; start it with --oidc-issuer";
        return Err(Error::Conflict(detail.into()));
    };
    check_field("/subject", subject_mistake(subject))?;
    Ok(Identity { issuer: oidc.config.issuer.as_str().to_owned(), subject: subject.to_owned() })
}

/// Change a person's role, password or account at the OpenID provider, or disable a person
///
/// The person's sessions end at once. If the change reduces the person's rights, open connections of the person's tokens end, too.
#[utoipa::path(patch, path = "/people/{name}", tag = "access", request_body = PersonChange,
    responses((status = 200, body = Person), (status = 409, body = Problem, description = "The only admin gives up the role, or the account signs in as another person")))]
pub(crate) async fn change(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Body(change, _): Body<PersonChange>,
) -> Result<(Extension<AuditSubject>, Json<Person>)> {
    let (row, changes) = edit(&auth, &caller, &name, change).await?;
    Ok((Extension(changes), Json(row.person)))
}

/// Changes a person. Also returns the changes for the audit log.
pub(super) async fn edit(
    auth: &Auth,
    caller: &Caller,
    name: &str,
    change: PersonChange,
) -> Result<(PersonRow, AuditSubject)> {
    check_field("/password", change.password.as_ref().and_then(|password| password_mistake(&password.0)))?;
    let unknown = || Error::NotFound("nobody has this name".into());
    auth.access.person(name).ok_or_else(unknown)?;
    let hash = match change.password {
        Some(password) => Some(auth.access.passwords.hash(password).await?),
        None => None,
    };
    // `Some(None)` removes the account.
    let new_identity = match change.subject.as_deref() {
        Some("") => Some(None),
        Some(subject) => Some(Some(identity(auth, subject)?)),
        None => None,
    };
    let _one_at_a_time = auth.access.change_lock.lock().await;
    let mut row = auth.access.person(name).ok_or_else(unknown)?;
    let before = row.clone();
    row.hash = hash.or(row.hash);
    if let Some(identity) = new_identity {
        identity.as_ref().map_or(Ok(()), |identity| check_account(auth, name, identity))?;
        row.person.identity = identity;
    }
    row.person.role = change.role.unwrap_or(row.person.role);
    row.person.disabled_at = match change.disabled {
        Some(true) => row.person.disabled_at.or(Some(crate::now())),
        Some(false) => None,
        None => row.person.disabled_at,
    };
    if is_admin(&before.person) && !is_admin(&row.person) {
        require_other_admin(auth, caller, name)?;
    }
    if row != before {
        auth.store.put_person(&row).await?;
        auth.access.put_person(row.clone());
    }
    let fields = |PersonRow { person, hash }: &PersonRow| {
        let subject = person.identity.as_ref().map(|identity| &identity.subject);
        let password = (*hash != before.hash).then_some("changed");
        json!({"role": person.role, "disabled": person.disabled_at.is_some(), "subject": subject, "password": password})
    };
    let changes = AuditSubject::of_changes(&fields(&before), &fields(&row));
    Ok((row, changes))
}

fn is_admin(person: &Person) -> bool {
    person.role == Role::Admin && person.disabled_at.is_none()
}

/// Refuses that a person takes the role from the only admin, after which nobody could change the people on the page.
fn require_other_admin(auth: &Auth, caller: &Caller, name: &str) -> Result<()> {
    let is_other = |person: &Person| person.name != name && is_admin(person);
    if caller.person().is_some() && !auth.access.people().iter().any(is_other) {
        return Err(Error::Conflict(format!("{name} is the only admin; make another person an admin first")));
    }
    Ok(())
}

/// Remove a person
///
/// The person's sessions end, and the person's tokens are revoked. The account at an OpenID provider cannot sign in until an admin binds it
/// to a person. Jobs and datasets keep the person's name, so they will belong to the next person with this name. Therefore disable people
/// who leave rather than remove them.
#[utoipa::path(delete, path = "/people/{name}", tag = "access",
    responses((status = 204), (status = 409, body = Problem, description = "The only admin removes themselves")))]
pub(crate) async fn delete(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    remove(&auth, &caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remove(auth: &Auth, caller: &Caller, name: &str) -> Result<()> {
    let _one_at_a_time = auth.access.change_lock.lock().await;
    require_other_admin(auth, caller, name)?;
    let row = auth.access.person(name).ok_or_else(|| Error::NotFound("nobody has this name".into()))?;
    auth.store.remove_person(&row, crate::now()).await?;
    auth.access.remove_person(name);
    Ok(())
}

/// Change one's own password
///
/// All sessions of the person end, including the session of this request.
#[utoipa::path(post, path = "/password", tag = "access", request_body = OwnPassword,
    responses((status = 204), (status = 409, body = Problem, description = "The request does not come from a person with a password"),
        (status = 429, body = Problem, description = "Too many wrong passwords")))]
pub(crate) async fn change_own(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    Body(passwords, _): Body<OwnPassword>,
) -> Result<StatusCode> {
    set_own_password(&auth, &caller, peer.address, passwords).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Changes the caller's password.
pub(super) async fn set_own_password(
    auth: &Auth,
    caller: &Caller,
    from: IpAddr,
    passwords: OwnPassword,
) -> Result<PersonRow> {
    let Some(name) = caller.person() else {
        let detail = "this request does not come from a person; sign in with a name and a password";
        return Err(Error::Conflict(detail.into()));
    };
    if auth.access.person(name).is_some_and(|row| row.hash.is_none()) {
        let detail =
            "you sign in with the OpenID provider and have no password here; an admin can give you one";
        return Err(Error::Conflict(detail.into()));
    }
    check_field("/new", password_mistake(&passwords.new.0))?;
    let before = match auth.access.authenticate_password(name, passwords.current, from).await {
        Ok(row) => row,
        Err(NotSignedIn::Wrong) => {
            return Err(Error::invalid("/current", "is not your current password"));
        }
        Err(other) => return Err(refusal(other, from)),
    };
    let hash = auth.access.passwords.hash(passwords.new).await?;
    let _one_at_a_time = auth.access.change_lock.lock().await;
    if auth.access.person(name).as_ref() != Some(&before) {
        return Err(Error::Conflict("an admin has changed this person meanwhile; sign in again".into()));
    }
    let row = PersonRow { hash: Some(hash), ..before };
    auth.store.put_person(&row).await?;
    auth.access.put_person(row.clone());
    Ok(row)
}

/// Converts a failed sign-in to an error.
pub(super) fn refusal(why: NotSignedIn, from: IpAddr) -> Error {
    match why {
        NotSignedIn::Wrong => Error::Unauthorized("the name or the password is wrong".into()),
        NotSignedIn::TooOften(wait) => too_often_error(from, wait),
        NotSignedIn::NotChecked(error) => error.into(),
    }
}

/// Returns the error for too many attempts to sign in.
pub(super) fn too_often_error(from: IpAddr, wait: Duration) -> Error {
    let secs = wait.as_secs() + 1;
    Error::TooMany(format!("too many attempts to sign in from {from}; try again in {secs} s"), secs)
}
