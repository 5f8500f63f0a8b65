use super::*;
use serde_json::json;

/// Returns a table in the format of `hccl_tools.py`, in which numbers are text.
fn servers(machines: u32, devices: u32) -> Value {
    let device = |s: u32, d: u32| json!({ "device_id": d.to_string(), "device_ip": format!("192.1.{s}.{d}"), "rank_id": (s * devices + d).to_string() });
    let server = |s: u32| json!({ "server_id": format!("10.0.0.{}", s + 1), "host_nic_ip": "reserve", "device": (0..devices).map(|d| device(s, d)).collect::<Vec<_>>() });
    json!({
        "version": "1.0", "server_count": machines.to_string(), "status": "completed",
        "server_list": (0..machines).map(server).collect::<Vec<_>>(),
    })
}

fn groups(ranks: u32, per_machine: u32) -> Value {
    let instance = |r: u32| json!({ "rank_id": r.to_string(), "server_id": format!("10.0.0.{}", r / per_machine + 1), "devices": [{ "device_id": (r % per_machine).to_string(), "device_ip": "192.1.27.6" }] });
    json!({
        "board_id": "0x0000", "chip_info": "910", "deploy_mode": "lab", "group_count": "1", "status": "completed",
        "group_list": [{
            "device_num": ranks.to_string(), "group_name": "", "instance_count": ranks.to_string(),
            "instance_list": (0..ranks).map(instance).collect::<Vec<_>>(), "server_num": (ranks / per_machine).to_string(),
        }],
    })
}

fn parse(table: &Value) -> Result<RankTable, String> {
    RankTable::parse(&serde_json::to_vec(table).unwrap())
}

#[test]
fn tables_of_2_8_and_16_devices_are_read_in_both_formats() {
    for (machines, devices) in [(1, 2), (2, 1), (1, 8), (2, 8)] {
        let table = parse(&servers(machines, devices)).unwrap();
        assert_eq!(table.world_size(), machines * devices);
        assert_eq!(table.machines.len(), machines as usize);
        assert_eq!(table, parse(&groups(machines * devices, devices)).unwrap());
        let last = table.machine_of(machines * devices - 1).unwrap();
        assert_eq!((last.0.address.as_str(), last.1), (&*format!("10.0.0.{machines}"), devices - 1));
        assert_eq!(table.machine_of(machines * devices), None);
    }
}

#[test]
fn ranks_are_placed_by_the_table() {
    // In reverse order on each machine, alternating between two machines.
    let mut table = servers(2, 2);
    for (s, d, rank) in [(0, 0, 2), (0, 1, 0), (1, 0, 3), (1, 1, 1)] {
        table["server_list"][s]["device"][d]["rank_id"] = json!(rank);
    }
    let table = parse(&table).unwrap();
    let devices_of =
        |m: usize| table.machines[m].devices.iter().map(|d| (d.rank, d.device)).collect::<Vec<_>>();
    assert_eq!((devices_of(0), devices_of(1)), (vec![(0, 1), (2, 0)], vec![(1, 1), (3, 0)]));
    assert_eq!(
        table.machine_of(2).map(|(machine, local)| (machine.address.as_str(), local)),
        Some(("10.0.0.1", 1))
    );
}

#[test]
fn errors_name_the_field() {
    let changed = |pointer: &str, value: Value| {
        let mut table = servers(2, 2);
        *table.pointer_mut(pointer).unwrap() = value;
        parse(&table).unwrap_err()
    };
    for (pointer, value, message) in [
        ("/status", json!("initializing"), "status: is \"initializing\""),
        ("/server_list", json!({}), "server_list: invalid type: map, expected a sequence"),
        ("/server_list/1/server_id", json!("-oProxyCommand=x"), "server_list[1].server_id: must be"),
        ("/server_list/1/server_id", json!("a b"), "server_list[1].server_id: must be"),
        ("/server_list/0/device", json!(7), "server_list[0].device: invalid type: integer `7`"),
        ("/server_list/0/device/1/rank_id", json!("0"), "rank_id: rank 0 is in the table twice"),
        (
            "/server_list/0/device/1/device_id",
            json!(0),
            "device_id: device 0 of 10.0.0.1 is in the table twice",
        ),
        ("/server_list/1/device/0", json!({}), "server_list[1].device[0]: missing field `rank_id`"),
        ("/server_list/0/device/1/rank_id", json!("-1"), "server_list[0].device[1].rank_id: is \"-1\""),
        ("/server_list/0/device/1/rank_id", json!(1.5), "server_list[0].device[1].rank_id: is 1.5"),
        ("/server_list/1/device/1/rank_id", json!(9), "rank 3 is missing"),
    ] {
        let error = changed(pointer, value);
        assert!(error.contains(message), "{pointer}: {error}");
    }
    assert!(parse(&json!({})).unwrap_err().contains("neither server_list nor group_list"));
    assert!(parse(&json!({ "server_list": [] })).unwrap_err().contains("has 0 devices"));
    let mut table = groups(2, 2);
    table["group_list"][0]["instance_list"][1]["devices"] = json!([]);
    assert!(parse(&table).unwrap_err().contains("group_list[0].instance_list[1].devices: invalid length 0"));
    assert!(RankTable::parse(b"{").unwrap_err().contains("EOF"));
}

#[test]
fn a_table_with_too_many_devices_or_bytes_is_refused() {
    let max = MAX_DEVICES as u32;
    assert_eq!(parse(&servers(2, max / 2)).unwrap().world_size(), max);
    assert!(
        parse(&servers(1, max + 1)).unwrap_err().contains("has 4097 devices; a rank table has 1 to 4096")
    );
    let with_name = |bytes: usize| {
        let mut table = servers(1, 2);
        table["server_list"][0]["server_id"] = json!("a".repeat(bytes));
        parse(&table)
    };
    assert!(with_name(253).is_ok());
    assert!(with_name(254).unwrap_err().contains("at most 253"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.json");
    let mut text = serde_json::to_vec(&servers(1, 2)).unwrap();
    text.resize(1 << 20, b' ');
    std::fs::write(&path, &text).unwrap();
    assert!(RankTable::read(&path).is_ok());
    text.push(b' ');
    std::fs::write(&path, &text).unwrap();
    assert!(RankTable::read(&path).unwrap_err().to_string().contains("larger than 1 MiB"));
}
