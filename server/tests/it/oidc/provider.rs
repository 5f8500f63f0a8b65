//! A small OpenID provider. It signs any claims that a test sets, and checks its client like a real provider.

use crate::test_server::{TestServer, client_from, client_without_redirects};
use axum::{
    Form, Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use base64::{Engine, engine::general_purpose::STANDARD, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use lockstep_server::{OidcConfig, ServeConfig};
use reqwest::{Response, Url, header};
use ring::{
    hmac,
    rand::SystemRandom,
    rsa,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair, RSA_PKCS1_SHA256},
};
use rustls::pki_types::{PrivatePkcs8KeyDer, pem::PemObject};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    process::Command,
    sync::{Arc, LazyLock, Mutex},
};
use tokio::net::TcpListener;

pub const CLIENT: &str = "lock:step=1";
pub const SECRET: &str = "s3cret &of the=client";

/// A key that signs tokens, or no key.
pub enum Signer {
    Rsa(rsa::KeyPair),
    Ec(EcdsaKeyPair),
    /// HMAC with these bytes, such as the client's secret or a public key.
    Hmac(Vec<u8>),
    Nothing,
}

/// A 2048-bit key, created once for all tests.
static RSA_KEY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let args = ["genpkey", "-quiet", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"];
    let output = Command::new("openssl").args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The PEM is PKCS #8 in every version of openssl.
    PrivatePkcs8KeyDer::from_pem_slice(&output.stdout).unwrap().secret_pkcs8_der().to_vec()
});

impl Signer {
    pub fn rsa() -> Self {
        Self::Rsa(rsa::KeyPair::from_pkcs8(&RSA_KEY).unwrap())
    }

    pub fn ec() -> Self {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        Self::Ec(EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, key.as_ref(), &random).unwrap())
    }

    fn alg(&self) -> &str {
        match self {
            Self::Rsa(_) => "RS256",
            Self::Ec(_) => "ES256",
            Self::Hmac(_) => "HS256",
            Self::Nothing => "none",
        }
    }

    /// The published key, as a JWK.
    pub fn public(&self, kid: &str) -> Value {
        match self {
            Self::Rsa(key) => {
                let public = rsa::PublicKeyComponents::<Vec<u8>>::from(key.public());
                // Some providers write a zero before the number.
                let n = [&[0], &public.n[..]].concat();
                json!({"kty": "RSA", "use": "sig", "kid": kid, "alg": "RS256", "n": BASE64.encode(n), "e": BASE64.encode(public.e)})
            }
            Self::Ec(key) => {
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                json!({"kty": "EC", "crv": "P-256", "kid": kid, "x": BASE64.encode(x), "y": BASE64.encode(y)})
            }
            Self::Hmac(key) => json!({"kty": "oct", "kid": kid, "k": BASE64.encode(key)}),
            Self::Nothing => Value::Null,
        }
    }

    fn sign(&self, text: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match self {
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, text, &mut signature).unwrap();
                signature
            }
            Self::Ec(key) => key.sign(&random, text).unwrap().as_ref().to_vec(),
            Self::Hmac(key) => hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text).as_ref().to_vec(),
            Self::Nothing => Vec::new(),
        }
    }
}

/// How the provider behaves.
pub struct Behaviour {
    pub keys: Vec<Value>,
    pub signer: Signer,
    /// Changes of the token's header. null removes a field.
    pub header: Value,
    /// Changes of the token's claims. null removes a claim.
    pub claims: Value,
    pub user_info: Value,
    /// Changes of the provider's description.
    pub description: Value,
    /// An error in place of tokens.
    pub refusal: Option<Value>,
    /// A change of the finished token.
    pub corrupt: fn(String) -> String,
    codes: HashMap<String, BTreeMap<String, String>>,
    pub key_requests: u32,
    pub token_requests: u32,
}

#[derive(Clone)]
pub struct Provider {
    pub address: SocketAddr,
    behaviour: Arc<Mutex<Behaviour>>,
}

/// Applies changes to an object. null removes a field.
fn merge(mut object: Value, changes: &Value) -> Value {
    for (name, value) in changes.as_object().into_iter().flatten() {
        object[name] = value.clone();
    }
    object.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    object
}

impl Provider {
    pub async fn start() -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap()).await
    }

    pub async fn at(listener: TcpListener) -> Self {
        let signer = Signer::rsa();
        let behaviour = Behaviour {
            keys: vec![signer.public("first")],
            signer,
            header: json!({"kid": "first"}),
            claims: json!({}),
            user_info: json!({}),
            description: json!({}),
            refusal: None,
            corrupt: |token| token,
            codes: HashMap::new(),
            key_requests: 0,
            token_requests: 0,
        };
        let address = listener.local_addr().unwrap();
        let provider = Self { address, behaviour: Arc::new(Mutex::new(behaviour)) };
        let router = Router::new()
            .route("/.well-known/openid-configuration", get(describe))
            .route("/keys", get(keys))
            .route("/token", post(token))
            .route("/me", get(user_info))
            .with_state(provider.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        provider
    }

    pub fn issuer(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn change(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    pub fn read<T>(&self, read: impl FnOnce(&Behaviour) -> T) -> T {
        read(&self.behaviour.lock().unwrap())
    }

    /// The settings of a server that uses this provider.
    pub fn config(&self) -> OidcConfig {
        let mut config = OidcConfig::new(self.issuer().parse().unwrap(), CLIENT.into());
        config.client_secret = Some(SECRET.parse().unwrap());
        config
    }

    pub async fn server(&self, change: impl FnOnce(&mut OidcConfig)) -> TestServer {
        let mut oidc = self.config();
        change(&mut oidc);
        TestServer::with(move |config: &mut ServeConfig| config.oidc = Some(oidc)).await
    }

    /// Simulates the sign-in on the provider's pages. Returns the code with which the provider redirects the browser to the server.
    pub fn issue_code(&self, params: &BTreeMap<String, String>) -> String {
        let mut behaviour = self.behaviour.lock().unwrap();
        let code = format!("code{}/+ &", behaviour.codes.len());
        behaviour.codes.insert(code.clone(), params.clone());
        code
    }
}

async fn describe(State(provider): State<Provider>) -> Json<Value> {
    let issuer = provider.issuer();
    let described = json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize?tenant=1"), "token_endpoint": format!("{issuer}/token"),
        "jwks_uri": format!("{issuer}/keys"), "userinfo_endpoint": format!("{issuer}/me"), "scopes_supported": ["openid", "groups"],
    });
    Json(provider.read(|b| merge(described, &b.description)))
}

async fn keys(State(provider): State<Provider>) -> Json<Value> {
    provider.change(|b| b.key_requests += 1);
    Json(provider.read(|b| json!({"keys": b.keys})))
}

async fn user_info(State(provider): State<Provider>, headers: HeaderMap) -> Result<Json<Value>, StatusCode> {
    match headers.get(header::AUTHORIZATION).is_some_and(|value| value == "Bearer for me") {
        true => Ok(Json(provider.read(|b| b.user_info.clone()))),
        false => Err(StatusCode::UNAUTHORIZED),
    }
}

type TokenResponse = (StatusCode, Json<Value>);

async fn token(
    State(provider): State<Provider>,
    headers: HeaderMap,
    Form(form): Form<BTreeMap<String, String>>,
) -> TokenResponse {
    let refuse =
        |error: &str| (StatusCode::BAD_REQUEST, Json(json!({"error": error, "error_description": "no <b>"})));
    // The client's id and secret, form-encoded (RFC 6749, section 2.3.1).
    let login = "lock%3Astep%3D1:s3cret+%26of+the%3Dclient";
    let mut behaviour = provider.behaviour.lock().unwrap();
    behaviour.token_requests += 1;
    if headers.get(header::AUTHORIZATION).is_none_or(|v| *v != format!("Basic {}", STANDARD.encode(login))) {
        return refuse("invalid_client");
    }
    if let Some(refusal) = &behaviour.refusal {
        return (StatusCode::BAD_REQUEST, Json(refusal.clone()));
    }
    let Some(params) = behaviour.codes.remove(&form["code"]) else { return refuse("invalid_grant") };
    let challenge = BASE64.encode(Sha256::digest(&form["code_verifier"]));
    assert_eq!(form["grant_type"], "authorization_code");
    if params["code_challenge"] != challenge || params["redirect_uri"] != form["redirect_uri"] {
        return refuse("invalid_grant");
    }
    let now = jiff::Timestamp::now().as_second();
    let claims = json!({
        "iss": provider.issuer(), "aud": CLIENT, "sub": "sub-1", "exp": now + 300, "iat": now, "nonce": params["nonce"],
        "preferred_username": "Ada",
    });
    let header = merge(json!({"alg": behaviour.signer.alg(), "typ": "JWT"}), &behaviour.header);
    let claims = merge(claims, &behaviour.claims);
    let text = format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()));
    let token = format!("{text}.{}", BASE64.encode(behaviour.signer.sign(text.as_bytes())));
    let token = (behaviour.corrupt)(token);
    (StatusCode::OK, Json(json!({"id_token": token, "access_token": "for me", "token_type": "Bearer"})))
}

/// A browser that signs in and keeps cookies.
pub struct Browser<'a> {
    pub server: &'a TestServer,
    client: reqwest::Client,
    pub cookies: BTreeMap<String, String>,
}

/// Parameters of the request to the provider.
pub type AuthRequest = BTreeMap<String, String>;

pub fn location(response: &Response) -> &str {
    response.headers()["location"].to_str().unwrap()
}

impl<'a> Browser<'a> {
    pub fn new(server: &'a TestServer) -> Self {
        Self { server, client: client_without_redirects(""), cookies: BTreeMap::new() }
    }

    /// A browser with this address of this machine. Attempts are counted by address.
    pub fn from(server: &'a TestServer, address: [u8; 4]) -> Self {
        Self { server, client: client_from(address), cookies: BTreeMap::new() }
    }

    pub async fn get(&mut self, path: &str) -> Response {
        let cookies: Vec<_> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let request = self.client.get(self.server.url(path)).header("cookie", cookies.join("; "));
        let response = request.send().await.unwrap();
        for cookie in response.headers().get_all("set-cookie") {
            let (pair, rest) = cookie.to_str().unwrap().split_once(';').unwrap();
            let (name, value) = pair.split_once('=').unwrap();
            assert!(rest.contains("HttpOnly; SameSite=Lax"), "{rest}");
            match rest.contains("Max-Age=0") {
                true => self.cookies.remove(name),
                false => self.cookies.insert(name.into(), value.into()),
            };
        }
        response
    }

    /// Begins a sign-in, and returns the parameters of the redirect to the provider.
    pub async fn begin(&mut self, provider: &Provider, query: &str) -> AuthRequest {
        let response = self.get(&format!("/login/oidc?{query}")).await;
        let status = response.status().as_u16();
        let location = response.headers().get("location").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(status, 303, "{}", response.text().await.unwrap());
        let url: Url = location.unwrap().parse().unwrap();
        assert!(url.as_str().starts_with(&format!("{}/authorize?tenant=1&", provider.issuer())), "{url}");
        let params: AuthRequest = url.query_pairs().into_owned().collect();
        assert_eq!(
            (params["client_id"].as_str(), params["code_challenge_method"].as_str()),
            (CLIENT, "S256")
        );
        assert_eq!(params["redirect_uri"], self.server.url("/login/oidc/callback"));
        params
    }

    /// Sends the callback with these parameters.
    pub async fn call_back(&mut self, fields: &[(&str, &str)]) -> Response {
        let mut url: Url = "http://none/login/oidc/callback".parse().unwrap();
        url.query_pairs_mut().extend_pairs(fields);
        self.get(&format!("{}?{}", url.path(), url.query().unwrap_or_default())).await
    }

    /// Signs in completely.
    pub async fn sign_in(&mut self, provider: &Provider) -> Response {
        let params = self.begin(provider, "").await;
        let code = provider.issue_code(&params);
        self.call_back(&[("state", &params["state"]), ("code", &code)]).await
    }

    /// Signs in, expects this error status, and returns the page.
    pub async fn sign_in_error(&mut self, provider: &Provider, status: u16) -> String {
        let response = self.sign_in(provider).await;
        let (actual, page) = (response.status().as_u16(), response.text().await.unwrap());
        assert_eq!(actual, status, "{page}");
        assert!(self.cookies.is_empty(), "no session, and no cookie of the sign-in: {:?}", self.cookies);
        page
    }

    pub async fn is_signed_in(&mut self) -> bool {
        self.get("/jobs").await.status() == 200
    }
}
