//! `lockstep machine`: the machines whose agents have joined the server.

use super::{
    age::age,
    api::{Api, ServerArgs, parse_elements},
    block_on,
    confirm::confirm,
    find_only, output, usage_error,
};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(clap::Args)]
pub(crate) struct MachineArgs {
    /// The machine's name or id, as in `machine list`
    #[arg(value_name = "NAME")]
    machine: String,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// List machines with their slots and warnings
    List(ServerArgs),
    /// Assign no new work to a machine; ranks that run there continue to their end (admins only)
    Drain(MachineArgs),
    /// Assign new work to a machine again (admins only)
    Undrain(MachineArgs),
    /// Remove an offline machine from the list and delete its measurements (admins only)
    Remove {
        #[command(flatten)]
        args: MachineArgs,
        /// Do not ask for confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
    },
}

/// The fields of a machine that these commands use.
#[derive(Deserialize)]
struct Machine {
    id: String,
    name: String,
    online: bool,
    /// Whether the machine is drained. Ranks may still run there.
    draining: bool,
    last_seen_at: Timestamp,
    warnings: Vec<Warning>,
    slots: Vec<Slot>,
}

#[derive(Deserialize)]
struct Warning {
    text: String,
}

#[derive(Deserialize)]
struct Slot {
    name: String,
    /// The rank in the slot. `None` if the slot is free.
    rank: Option<u32>,
}

/// Runs the action.
///
/// # Errors
/// Exit status 2 if no machine or several machines have the name, or the removal is not confirmed; or the server refuses the request.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    block_on(async {
        match action {
            Action::List(server) => list_machines(&server).await,
            Action::Drain(args) => set_draining(&args, true).await,
            Action::Undrain(args) => set_draining(&args, false).await,
            Action::Remove { args, yes } => remove(&args, yes).await,
        }
    })
}

async fn list_machines(server: &ServerArgs) -> anyhow::Result<()> {
    let values = server.api()?.read_all("/agents").await?;
    if server.json {
        return output::json(&values);
    }
    let machines: Vec<Machine> = parse_elements(&values, "agents");
    if machines.is_empty() {
        return output::line("no machines; the server's page Machines has the command that joins a machine");
    }
    let header = ["NAME", "ID", "STATE", "BUSY", "SLOTS"];
    output::table_of_names(&header, &["NAME"], machines.iter().map(row))?;
    for machine in &machines {
        for warning in &machine.warnings {
            output::line(output::one_line(&format!("{}: {}", machine.name, warning.text)))?;
        }
    }
    Ok(())
}

fn row(machine: &Machine) -> [String; 5] {
    let mut state = if machine.online {
        "online".to_owned()
    } else {
        format!("last seen {} ago", age(machine.last_seen_at))
    };
    if machine.draining {
        state.push_str(", drained");
    }
    let busy = format!("{} of {}", machine.busy_slots(), machine.slots.len());
    [machine.name.clone(), machine.id.clone(), state, busy, count_by_kind(&machine.slots)]
}

/// Counts slots by kind: `8 x NVIDIA H200`.
fn count_by_kind(slots: &[Slot]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for slot in slots {
        match counts.iter_mut().find(|(name, _)| *name == slot.name) {
            Some((_, count)) => *count += 1,
            None => counts.push((&slot.name, 1)),
        }
    }
    let parts: Vec<_> = counts.iter().map(|(name, count)| format!("{count} x {name}")).collect();
    parts.join(", ")
}

impl Machine {
    fn busy_slots(&self) -> usize {
        self.slots.iter().filter(|slot| slot.rank.is_some()).count()
    }
}

/// Finds the machine with this name or id.
///
/// # Errors
/// Exit status 2 if no machine or several machines have the name.
async fn find(api: &Api, name_or_id: &str) -> anyhow::Result<Machine> {
    choose(api.list("/agents").await?, name_or_id)
}

fn choose(mut machines: Vec<Machine>, name_or_id: &str) -> anyhow::Result<Machine> {
    machines.retain(|machine| machine.name == name_or_id || machine.id == name_or_id);
    find_only("machine", name_or_id, machines, |Machine { name, id, online, .. }| {
        format!("{name} (id {id}, {})", if *online { "online" } else { "offline" })
    })
}

/// Returns the URL path of a machine. An agent chooses its id, so an invalid id must not lead to another path.
fn path(machine: &Machine) -> anyhow::Result<String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if machine.id.is_empty() || !machine.id.bytes().all(is_plain) {
        return Err(usage_error(output::one_line(&format!(
            "the id of {} is invalid: {:?}; use the page Machines",
            machine.name, machine.id
        ))));
    }
    Ok(format!("/agents/{}", machine.id))
}

async fn set_draining(args: &MachineArgs, draining: bool) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let machine = find(&api, &args.machine).await?;
    let action = if draining { "drain" } else { "undrain" };
    api.post::<Value>(&format!("{}/{action}", path(&machine)?), &json!({})).await?;
    if args.server.json {
        return output::json(&json!({ "id": machine.id, "name": machine.name, "draining": draining }));
    }
    // Reads the machine again, because ranks may have started there since.
    let machine = find(&api, &machine.id).await?;
    let name = &machine.name;
    let words = match (draining, machine.busy_slots()) {
        (false, _) => format!("{name} takes work again"),
        (true, 0) => format!("{name} takes no new work; no rank runs there now"),
        (true, 1) => format!("{name} takes no new work; the rank that runs there runs to its end"),
        (true, busy) => format!("{name} takes no new work; the {busy} ranks that run there run to their end"),
    };
    output::line(output::one_line(&words))
}

async fn remove(args: &MachineArgs, yes: bool) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let machine = find(&api, &args.machine).await?;
    let path = path(&machine)?;
    let Machine { id, name, .. } = machine;
    let question = format!(
        "Remove {name} from the list and delete its measurements? An agent that is later started on this machine joins again, \
         unless the agent's token or certificate is revoked."
    );
    confirm(yes, question, format_args!("machine {name}"))?;
    api.delete(&path).await?;
    let value = json!({ "removed": name, "id": id });
    output::print(args.server.json, &value, output::one_line(&format!("{name} removed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(id: &str, name: &str, ranks: &[Option<u32>]) -> Machine {
        Machine {
            id: id.into(),
            name: name.into(),
            online: true,
            draining: false,
            last_seen_at: Timestamp::now(),
            warnings: Vec::new(),
            slots: ranks.iter().map(|rank| Slot { name: "NVIDIA H200".into(), rank: *rank }).collect(),
        }
    }

    #[test]
    fn a_machine_is_found_by_a_unique_name_or_id() {
        let all = || {
            vec![
                machine("1", "a", &[]),
                machine("2", "b", &[]),
                machine("3", "b", &[]),
                machine("a", "c", &[]),
            ]
        };
        let found = |asked| choose(all(), asked).map(|machine| machine.id).map_err(|e| e.to_string());
        assert_eq!((found("3"), found("c")), (Ok("3".into()), Ok("a".into())));
        let several = found("b").unwrap_err();
        assert!(
            several.starts_with("2 machines have the name or the id b: b (id 2, online), b (id 3, online); "),
            "{several}"
        );
        // A machine whose id is another machine's name does not hide that machine.
        let several = found("a").unwrap_err();
        assert!(several.contains("a (id 1, online), c (id a, online)"), "{several}");
        assert!(found("d").unwrap_err().starts_with("no machine is called d; "));
    }

    #[test]
    fn an_id_cannot_lead_to_another_path() {
        assert_eq!(path(&machine("0af3-id_a", "a", &[])).unwrap(), "/agents/0af3-id_a");
        for id in ["", ".", "..", "../people/ada", "a/b", "a?b", "a#b", "a%2Fb", "ä"] {
            assert!(path(&machine(id, "a", &[])).is_err(), "{id}");
        }
    }

    #[test]
    fn a_row_counts_busy_slots_and_names_their_kinds() {
        let mut machine = machine("1", "a", &[Some(0), None]);
        machine.slots.push(Slot { name: "4 cores".into(), rank: None });
        machine.draining = true;
        let slots = "2 x NVIDIA H200, 1 x 4 cores";
        assert_eq!(row(&machine), ["a", "1", "online, drained", "1 of 3", slots]);
    }
}
