//! An agent's first message.

use crate::store::AgentRow;
use lockstep_protocol::{
    JobId,
    agent::{AttemptRef, FromAgent, PROTOCOL_VERSION},
    invisible::first_invisible,
};
use std::collections::HashSet;

/// Maximum length of an agent's name and of its id, in bytes.
const NAME_BYTES: usize = 100;
/// Maximum number of slots of an agent.
const SLOTS: usize = 1024;
/// Maximum number of attempts of an agent: one for each slot, and attempts whose end is not reported yet.
pub(super) const ATTEMPTS: usize = 4 * SLOTS;
pub(super) const TOO_MANY_ATTEMPTS: &str = "it reports more than 4096 attempts";
/// Maximum length of each text in a machine's description, in bytes.
const DESCRIPTION_BYTES: usize = 500;

/// The checked contents of `Hello`.
pub(super) struct Hello {
    pub(super) row: AgentRow,
    pub(super) attempts: Vec<AttemptRef>,
    pub(super) only_job: Option<JobId>,
    pub(super) no_work: Option<String>,
    pub(super) process: String,
}

/// Truncates a text of an agent to the maximum length.
pub(super) fn shortened(mut words: String) -> String {
    words.truncate(words.floor_char_boundary(DESCRIPTION_BYTES));
    words
}

/// Checks an agent's first message. The error is for the agent's user.
pub(super) fn check_hello(message: FromAgent) -> Result<Hello, String> {
    let FromAgent::Hello { protocol, agent_id, name, machine, slots, attempts, only_job, no_work, process } =
        message
    else {
        return Err("the first message of a connection must be Hello".into());
    };
    if protocol != PROTOCOL_VERSION {
        return Err(format!(
            "this server uses version {PROTOCOL_VERSION} of the protocol and the agent version {protocol}; \
             run the same version of lockstep on both"
        ));
    }
    let named =
        |text: &str| !text.trim().is_empty() && text.len() <= NAME_BYTES && first_invisible(text).is_none();
    if !named(&name) || !named(&agent_id) {
        return Err(format!(
            "an agent's name must have 1 to {NAME_BYTES} plain characters; give one with --name"
        ));
    }
    // The id is a part of URLs.
    let in_id = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if !agent_id.bytes().all(in_id) {
        return Err(
            "an agent's id has letters (a to z, A to Z), digits, - and _; without the file agent_id in its folder it gets a new id".into(),
        );
    }
    if slots.len() > SLOTS {
        let count = slots.len();
        return Err(format!("this agent has {count} slots, and at most {SLOTS} are allowed: give it fewer"));
    }
    if attempts.len() > ATTEMPTS {
        return Err(TOO_MANY_ATTEMPTS.into());
    }
    let (mut machine, mut slots) = (machine, slots);
    for text in [&mut machine.hostname, &mut machine.cpu, &mut machine.version] {
        text.truncate(text.floor_char_boundary(DESCRIPTION_BYTES));
    }
    for text in [&mut machine.address, &mut machine.interface, &mut machine.network_id] {
        // Truncated, these would belong to another machine.
        *text = text.take().filter(|text| text.len() <= NAME_BYTES && first_invisible(text).is_none());
    }
    for slot in &mut slots {
        for text in [Some(&mut slot.name), Some(&mut slot.device), slot.uuid.as_mut()].into_iter().flatten() {
            text.truncate(text.floor_char_boundary(DESCRIPTION_BYTES));
        }
    }
    // Each slot may be in at most one group, and groups may have only known slots.
    let mut unseen: HashSet<u32> = slots.iter().map(|slot| slot.index).collect();
    if unseen.len() < slots.len() {
        return Err("this agent names a slot twice, so that two ranks would share it".into());
    }
    machine.nvlink_groups.iter_mut().for_each(|group| group.retain(|slot| unseen.remove(slot)));
    machine.nvlink_groups.retain(|group| group.len() > 1);
    let row = AgentRow { id: agent_id, name, machine, slots, last_seen_at: crate::now() };
    let no_work = no_work.map(shortened);
    let process = shortened(process);
    Ok(Hello { row, attempts, only_job, no_work, process })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::agent::{Machine, Slot};

    /// Checks the introduction of an agent with these lengths and numbers.
    fn checked(name: usize, slots: usize, attempts: usize, description: usize) -> Result<Hello, String> {
        check_hello(hello_of(&"n".repeat(name), slots, attempts, description))
    }

    fn hello_of(name: &str, slots: usize, attempts: usize, description: usize) -> FromAgent {
        let text = "d".repeat(description);
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
            check_hello(hello)
        };
        assert!(hello("0af3-ID_a").is_ok());
        for id in [".", "..", "../people/ada", "a/b", "a?b", "a#b", "a%2Fb", "a b", "ä"] {
            assert!(hello(id).err().unwrap().contains("an agent's id has letters"), "{id}");
        }
    }

    #[test]
    fn a_slot_index_that_occurs_twice_is_refused() {
        let hello = |indices: [u32; 2]| {
            let mut hello = hello_of("node", 2, 0, 1);
            if let FromAgent::Hello { slots, .. } = &mut hello {
                slots.iter_mut().zip(indices).for_each(|(slot, index)| slot.index = index);
            }
            check_hello(hello)
        };
        assert!(hello([0, 7]).is_ok());
        assert!(hello([3, 3]).err().unwrap().contains("names a slot twice"));
    }

    #[test]
    fn introductions_above_the_limits_are_refused() {
        let largest =
            checked(NAME_BYTES, SLOTS, ATTEMPTS, DESCRIPTION_BYTES).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!((largest.row.slots.len(), largest.attempts.len()), (1024, 4096));
        assert_eq!(largest.row.machine.address.map(|address| address.len()), Some(100));
        for (checked, expected) in [
            (checked(NAME_BYTES + 1, 1, 0, 1), "1 to 100 plain characters; give one with --name"),
            (checked(1, SLOTS + 1, 0, 1), "has 1025 slots, and at most 1024 are allowed"),
            (checked(1, 1, ATTEMPTS + 1, 1), "more than 4096 attempts"),
        ] {
            let why = checked.err().expect("it is above a limit");
            assert!(why.contains(expected), "{why}");
        }
        // Descriptions that are too long are cut.
        for (bytes, kept) in [(500, 500), (501, 500), (1 << 20, 500)] {
            let row = checked(1, 1, 0, bytes).unwrap_or_else(|why| panic!("{why}")).row;
            let machine = row.machine;
            for text in [&machine.hostname, &machine.cpu, &machine.version, &row.slots[0].name] {
                assert_eq!(text.len(), kept);
            }
        }
    }
}
