//! Options of `serve` for an OpenID provider that signs people in.

use super::{access::secret_file_warning, usage_error};
use lockstep_protocol::people::Role;
use lockstep_server::{ClientSecret, Groups, Issuer, NameClaim, OidcConfig};
use std::{env, fs::File, io::Read, path::PathBuf};

/// Environment variable with the client secret itself. No option accepts the secret, because other accounts of the machine can see a
/// process's arguments.
const SECRET_VARIABLE: &str = "LOCKSTEP_OIDC_CLIENT_SECRET";
/// Maximum size of a file with a secret.
const FILE_BYTES: u64 = 8192;

#[derive(clap::Args)]
pub(crate) struct OidcArgs {
    /// OpenID provider that also signs people in: its issuer URL exactly as the provider writes it
    #[arg(long, value_name = "URL", requires = "oidc_client_id")]
    oidc_issuer: Option<Issuer>,
    /// This server's client id at the provider; <public-url>/login/oidc/callback must be registered there as a redirect URI
    #[arg(long, value_name = "ID", requires = "oidc_issuer")]
    oidc_client_id: Option<String>,
    /// File with the client secret (or set LOCKSTEP_OIDC_CLIENT_SECRET); a public client needs no secret
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    oidc_client_secret_file: Option<PathBuf>,
    /// Name of the provider on the sign-in button [default: the issuer's host]
    #[arg(long, value_name = "NAME", requires = "oidc_issuer")]
    oidc_name: Option<String>,
    /// Add people at their first sign-in, with the role viewer, member or admin [default: only people whom an admin has added may sign in]
    #[arg(long, value_name = "ROLE", requires = "oidc_issuer")]
    oidc_role: Option<Role>,
    /// Claim from which people get their names at their first sign-in: preferred_username, or email if it is verified
    #[arg(long, value_name = "CLAIM", default_value = "preferred_username")]
    oidc_claim: NameClaim,
    /// Claim that lists an account's groups, such as groups; the groups determine the role at every sign-in
    #[arg(long, value_name = "CLAIM", requires = "oidc_issuer")]
    oidc_group_claim: Option<String>,
    /// Group whose members are admins
    #[arg(long, value_name = "GROUP", requires = "oidc_group_claim")]
    oidc_admin_group: Option<String>,
    /// Group whose members have the role member. People in neither group get the role in --oidc-role, or are refused without --oidc-role
    #[arg(long, value_name = "GROUP", requires = "oidc_group_claim")]
    oidc_member_group: Option<String>,
    /// CA certificates to trust in addition to the system's (PEM), for connections to the provider
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    oidc_ca: Option<PathBuf>,
}

impl OidcArgs {
    /// Returns the provider's configuration, if a provider is given.
    ///
    /// # Errors
    /// The secret cannot be read.
    pub(crate) fn config(self) -> anyhow::Result<Option<OidcConfig>> {
        let (Some(issuer), Some(client_id)) = (self.oidc_issuer, self.oidc_client_id) else {
            return Ok(None);
        };
        let secret = match self.oidc_client_secret_file {
            Some(path) => Some((format!("the file {}", path.display()), read_secret(&path)?)),
            None => env::var(SECRET_VARIABLE).ok().map(|secret| (SECRET_VARIABLE.to_owned(), secret)),
        };
        let parse = |(source, text): (String, String)| {
            text.parse::<ClientSecret>()
                .map_err(|error| usage_error(format!("the client secret in {source}: {error}")))
        };
        let groups = self.oidc_group_claim.map(|claim| Groups {
            claim,
            admin: self.oidc_admin_group,
            member: self.oidc_member_group,
        });
        let mut config = OidcConfig::new(issuer, client_id);
        config.client_secret = secret.map(parse).transpose()?;
        config.name = self.oidc_name;
        config.role = self.oidc_role;
        config.name_claim = self.oidc_claim;
        config.groups = groups;
        config.ca_file = self.oidc_ca;
        Ok(Some(config))
    }
}

fn read_secret(path: &PathBuf) -> anyhow::Result<String> {
    let failed =
        |error: std::io::Error| usage_error(format!("--oidc-client-secret-file {}: {error}", path.display()));
    if let Some(warning) = secret_file_warning(path) {
        tracing::warn!("{warning}");
    }
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(FILE_BYTES).read_to_string(&mut text)).map_err(failed)?;
    Ok(text)
}
