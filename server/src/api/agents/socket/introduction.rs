//! An agent's first message.

use crate::{agents::JoiningAgent, store::AgentRow};
use lockstep_protocol::{
    agent::{AttemptRef, FromAgent, PROTOCOL_VERSION},
    invisible::first_invisible,
};
use std::{collections::HashSet, net::IpAddr};

/// Maximum length of an agent's name, and of an agent's id, in bytes.
const MAX_NAME_BYTES: usize = 100;
/// Maximum number of slots of an agent.
const MAX_SLOTS: usize = 1024;
/// Maximum number of attempts that an agent reports. An agent may have more attempts than slots, because it also reports attempts whose
/// end is not stored yet.
pub(super) const MAX_ATTEMPTS: usize = 4 * MAX_SLOTS;
pub(super) const TOO_MANY_ATTEMPTS: &str = "the agent reports more than 4096 attempts";
/// Maximum length of each text in a machine's description, in bytes.
const MAX_DESCRIPTION_BYTES: usize = 500;

/// Truncates a text of an agent to the maximum length.
pub(super) fn truncate_text(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_DESCRIPTION_BYTES));
    text
}

/// Checks an agent's first message, which was sent from `address`. Returns the agent and its attempts. The error is for the agent's user.
pub(super) fn check_hello(
    message: FromAgent,
    address: IpAddr,
) -> Result<(JoiningAgent, Vec<AttemptRef>), String> {
    let FromAgent::Hello { protocol, agent_id, name, machine, slots, attempts, only_job, no_work, process } =
        message
    else {
        return Err("the first message of a connection must be Hello".into());
    };
    if protocol != PROTOCOL_VERSION {
        return Err(format!(
            "this server uses version {PROTOCOL_VERSION} of the protocol, but the agent uses version {protocol}; \
             run the same version of lockstep on both machines"
        ));
    }
    let is_valid_name = |text: &str| {
        !text.trim().is_empty() && text.len() <= MAX_NAME_BYTES && first_invisible(text).is_none()
    };
    if !is_valid_name(&name) || !is_valid_name(&agent_id) {
        return Err(format!(
            "an agent's name must have 1 to {MAX_NAME_BYTES} plain characters; choose a name with --name"
        ));
    }
    // URLs contain the id.
    let is_allowed_in_id = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if !agent_id.bytes().all(is_allowed_in_id) {
        return Err(
            "an agent's id must contain only letters (a to z, A to Z), digits, - and _; remove the file agent_id in the agent's data \
             directory, so that the agent gets a new id"
                .into(),
        );
    }
    if slots.len() > MAX_SLOTS {
        let count = slots.len();
        return Err(format!(
            "this agent has {count} slots, but at most {MAX_SLOTS} are allowed; start it with fewer slots"
        ));
    }
    if attempts.len() > MAX_ATTEMPTS {
        return Err(TOO_MANY_ATTEMPTS.into());
    }
    let (mut machine, mut slots) = (machine, slots);
    for text in [&mut machine.hostname, &mut machine.cpu, &mut machine.version] {
        text.truncate(text.floor_char_boundary(MAX_DESCRIPTION_BYTES));
    }
    for text in [&mut machine.address, &mut machine.interface, &mut machine.network_id] {
        // Removed rather than truncated, because a truncated address or name could be that of another machine.
        *text = text.take().filter(|text| text.len() <= MAX_NAME_BYTES && first_invisible(text).is_none());
    }
    for slot in &mut slots {
        for text in [Some(&mut slot.name), Some(&mut slot.device), slot.uuid.as_mut()].into_iter().flatten() {
            text.truncate(text.floor_char_boundary(MAX_DESCRIPTION_BYTES));
        }
    }
    // Each slot may be in at most one group, and groups may have only known slots.
    let mut ungrouped: HashSet<u32> = slots.iter().map(|slot| slot.index).collect();
    if ungrouped.len() < slots.len() {
        return Err("this agent names a slot twice, so two ranks would share the slot".into());
    }
    machine.nvlink_groups.iter_mut().for_each(|group| group.retain(|slot| ungrouped.remove(slot)));
    machine.nvlink_groups.retain(|group| group.len() > 1);
    let row = AgentRow { id: agent_id, name, machine, slots, last_seen_at: crate::now() };
    let (no_work_reason, process) = (no_work.map(truncate_text), truncate_text(process));
    Ok((JoiningAgent { row, only_job, no_work_reason, process, address }, attempts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{
        JobId,
        agent::{Machine, Slot},
    };
    use std::net::Ipv4Addr;

    fn check(message: FromAgent) -> Result<(JoiningAgent, Vec<AttemptRef>), String> {
        check_hello(message, Ipv4Addr::LOCALHOST.into())
    }

    /// Checks the introduction of an agent with these lengths and counts.
    fn checked(
        name_bytes: usize,
        slots: usize,
        attempts: usize,
        description_bytes: usize,
    ) -> Result<(JoiningAgent, Vec<AttemptRef>), String> {
        check(hello_of(&"n".repeat(name_bytes), slots, attempts, description_bytes))
    }

    fn hello_of(name: &str, slots: usize, attempts: usize, description_bytes: usize) -> FromAgent {
        let text = "d".repeat(description_bytes);
        let one = AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() };
        FromAgent::Hello {
            protocol: PROTOCOL_VERSION,
            agent_id: name.to_owned(),
            name: name.to_owned(),
            machine: Machine {
                hostname: text.clone(),
                cpu: text.clone(),
                cores: 1,
                memory_bytes: 1,
                disk_free_bytes: 1,
                version: text.clone(),
                address: Some(name.to_owned()),
                ..Machine::default()
            },
            slots: (0..slots as u32)
                .map(|index| Slot {
                    index,
                    device: "cpu".into(),
                    name: text.clone(),
                    memory_bytes: 0,
                    uuid: None,
                })
                .collect(),
            attempts: vec![one; attempts],
            only_job: None,
            no_work: None,
            process: String::new(),
        }
    }

    #[test]
    fn ids_with_special_characters_are_refused() {
        let hello = |id: &str| {
            let mut hello = hello_of("node", 2, 0, 1);
            if let FromAgent::Hello { agent_id, .. } = &mut hello {
                *agent_id = id.into();
            }
            check(hello)
        };
        assert!(hello("0af3-ID_a").is_ok());
        for id in [".", "..", "../people/ada", "a/b", "a?b", "a#b", "a%2Fb", "a b", "ä"] {
            assert!(hello(id).err().unwrap().contains("an agent's id must contain only letters"), "{id}");
        }
    }

    #[test]
    fn a_slot_index_that_occurs_twice_is_refused() {
        let hello = |indices: [u32; 2]| {
            let mut hello = hello_of("node", 2, 0, 1);
            if let FromAgent::Hello { slots, .. } = &mut hello {
                slots.iter_mut().zip(indices).for_each(|(slot, index)| slot.index = index);
            }
            check(hello)
        };
        assert!(hello([0, 7]).is_ok());
        assert!(hello([3, 3]).err().unwrap().contains("names a slot twice"));
    }

    #[test]
    fn introductions_above_the_limits_are_refused() {
        let (largest, attempts) = checked(MAX_NAME_BYTES, MAX_SLOTS, MAX_ATTEMPTS, MAX_DESCRIPTION_BYTES)
            .unwrap_or_else(|why| panic!("{why}"));
        assert_eq!((largest.row.slots.len(), attempts.len()), (1024, 4096));
        assert_eq!(largest.row.machine.address.map(|address| address.len()), Some(100));
        for (checked, expected) in [
            (checked(MAX_NAME_BYTES + 1, 1, 0, 1), "1 to 100 plain characters; choose a name with --name"),
            (checked(1, MAX_SLOTS + 1, 0, 1), "has 1025 slots, but at most 1024 are allowed"),
            (checked(1, 1, MAX_ATTEMPTS + 1, 1), "more than 4096 attempts"),
        ] {
            let why = checked.expect_err("it is above a limit");
            assert!(why.contains(expected), "{why}");
        }
        // Descriptions that are too long are truncated.
        for (bytes, kept) in [(500, 500), (501, 500), (1 << 20, 500)] {
            let row = checked(1, 1, 0, bytes).unwrap_or_else(|why| panic!("{why}")).0.row;
            let machine = row.machine;
            for text in [&machine.hostname, &machine.cpu, &machine.version, &row.slots[0].name] {
                assert_eq!(text.len(), kept);
            }
        }
    }
}
