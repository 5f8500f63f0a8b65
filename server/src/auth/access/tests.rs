use super::*;

fn row(id: &str, scope: Scope, secret: &Secret) -> TokenRow {
    let token = Token::of(id.into(), id.into(), scope, crate::now());
    TokenRow { token, hash: secret.hash.clone() }
}

fn session(token_id: &str, secret: &Secret, created_at: Timestamp) -> SessionRow {
    SessionRow {
        hash: secret.hash.clone(),
        token_id: token_id.into(),
        created_at,
        expires_at: crate::now() + SESSION_LIFE,
    }
}

#[test]
fn revoking_a_token_ends_all_its_sessions_and_signing_out_ends_one() {
    let access = Access::new(true);
    let (token, first, second) =
        (Secret::new_token().unwrap(), Secret::new_plain().unwrap(), Secret::new_plain().unwrap());
    access.put_token(row("t", Scope::Admin, &token));
    for secret in [&first, &second] {
        assert!(access.put_session(session("t", secret, crate::now())).is_none());
    }
    let caller = access.authenticate_session(&second.text).expect("signed in");
    assert!(caller.may(Scope::Admin) && !caller.may(Scope::Agent));
    assert_eq!(caller.session(), Some(second.hash.as_str()));
    assert!(access.authenticate_token(&first.text).is_err(), "a cookie is not accepted as a token");
    assert!(access.authenticate_session(&token.text).is_none(), "a token is not accepted as a cookie");
    access.remove_session(&first.hash);
    assert!(access.authenticate_session(&first.text).is_none());
    assert!(access.authenticate_session(&second.text).is_some());

    let mut revoked = access.token("t").unwrap();
    revoked.token.revoked_at = Some(crate::now());
    access.put_token(revoked);
    assert_eq!(access.authenticate_token(&token.text).err(), Some(Denied::Revoked));
    assert!(access.authenticate_session(&second.text).is_none());
    assert!(caller.0.is_some_and(|c| c.ended.is_cancelled()), "the token's websockets close");
}

#[test]
fn the_use_of_a_token_is_stored_once_and_its_sessions_are_limited() {
    let access = Access::new(true);
    let secret = Secret::new_token().unwrap();
    access.put_token(row("t", Scope::Read, &secret));
    assert!(access.take_new_uses().is_empty());
    access.authenticate_token(&secret.text).expect("valid");
    access.authenticate_token(&secret.text).expect("valid");
    assert_eq!(access.take_new_uses().len(), 1);
    assert!(access.take_new_uses().is_empty(), "the use is not stored for every request");

    let start = crate::now();
    let (other, earlier) = (Secret::new_token().unwrap(), Secret::new_plain().unwrap());
    access.put_token(row("other", Scope::Admin, &other));
    assert!(access.put_session(session("other", &earlier, start)).is_none());
    let added: Vec<_> = (0..=MAX_SESSIONS_OF_A_TOKEN as u64)
        .map(|n| {
            let secret = Secret::new_plain().unwrap();
            let removed = access.put_session(session("t", &secret, start + Duration::from_millis(n)));
            (secret, removed)
        })
        .collect();
    let (last, others) = added.split_last().unwrap();
    assert!(others.iter().all(|(_, removed)| removed.is_none()));
    assert_eq!(last.1.as_ref(), Some(&added[0].0.hash), "the oldest session of the token is removed");
    assert!(
        access.authenticate_session(&added[0].0.text).is_none()
            && access.authenticate_session(&added[1].0.text).is_some()
    );
    assert!(access.authenticate_session(&earlier.text).is_some(), "sessions of other tokens stay");
}

#[test]
fn the_number_of_all_sessions_is_limited() {
    let access = Access::new(true);
    let start = crate::now();
    let mut first = None;
    for n in 0..=MAX_SESSIONS {
        let id = format!("t{}", n / MAX_SESSIONS_OF_A_TOKEN);
        if n % MAX_SESSIONS_OF_A_TOKEN == 0 {
            access.put_token(row(&id, Scope::Read, &Secret::new_token().unwrap()));
        }
        let secret = Secret::new_plain().unwrap();
        let removed = access.put_session(session(&id, &secret, start + Duration::from_millis(n as u64)));
        let first = first.get_or_insert(secret);
        assert_eq!(removed, (n == MAX_SESSIONS).then(|| first.hash.clone()), "{n}");
    }
}

#[test]
fn a_session_ends_with_its_token() {
    let access = Access::new(true);
    let (token, cookie) = (Secret::new_token().unwrap(), Secret::new_plain().unwrap());
    let mut expired = row("t", Scope::Read, &token);
    expired.token.expires_at = Some(crate::now() - Duration::from_secs(1));
    access.put_token(expired);
    access.put_session(session("t", &cookie, crate::now()));
    assert!(access.authenticate_session(&cookie.text).is_none(), "even before `expire` runs");
}

#[test]
fn a_login_code_of_a_revoked_token_is_refused() {
    let access = Access::new(true);
    let secret = Secret::new_token().unwrap();
    access.put_token(row("t", Scope::Submit, &secret));
    let (used_before, used_after) =
        (access.codes.make("t", None).unwrap(), access.codes.make("t", None).unwrap());
    assert_eq!(access.take_login_code(&used_before), Some(("t".into(), None)));
    let mut revoked = access.token("t").unwrap();
    revoked.token.revoked_at = Some(crate::now());
    access.put_token(revoked);
    assert_eq!(access.take_login_code(&used_after), None);
}
