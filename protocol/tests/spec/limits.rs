//! Values, depths and lengths at their limits and beyond.

use super::*;

#[test]
fn transforms_are_accepted_up_to_their_limits() {
    for line in [
        "crop_scale = [0.001, 1.0]",
        "crop_scale = [1, 1]",
        "crop_ratio = [0.0625, 16]",
        "resize_size = 224\nimage_size = 224",
        "color_jitter = [10, 10, 10, 0.5]",
        "color_jitter = [0, 0, 0, 0]",
    ] {
        let spec = from_toml(&job_with("data", line)).unwrap_or_else(|e| panic!("{line}: {e:?}"));
        assert_eq!(from_json(&serde_json::to_value(&spec).expect("plain data")), Ok(spec), "{line}");
    }
}

/// A path such as `a.a.a` with `parts` parts.
fn path(parts: usize) -> String {
    vec!["a"; parts].join(".")
}

#[test]
fn keys_to_set_have_a_limited_depth_and_length() {
    let set = |argument: &str| {
        let mut document = json!({});
        apply_set(&mut document, argument).map(|()| document)
    };
    let deepest = set(&format!("{}=1", path(KEY_PARTS))).unwrap();
    assert_eq!(deepest.pointer(&"/a".repeat(KEY_PARTS)), Some(&json!(1)));
    for parts in [KEY_PARTS + 1, 20_000, 1_000_000] {
        let error = set(&format!("{}=1", path(parts))).unwrap_err();
        assert!(error.contains("at most 8 parts") && error.len() < 300, "{error}");
    }
    assert!(set(&format!("{}=1", "k".repeat(KEY_BYTES))).is_ok());
    let error = set(&format!("{}=1", "k".repeat(KEY_BYTES + 1))).unwrap_err();
    assert!(error.contains("256 bytes"), "{error}");
    let long = "v".repeat(100_000);
    assert!(set(&long).unwrap_err().len() < 300, "a message is short");
    // A value that is not TOML is text, with any number of dots and brackets.
    let dots = path(50);
    assert_eq!(set(&format!("data.dataset=/{dots}")).unwrap()["data"]["dataset"], format!("/{dots}"));
    assert!(set(&format!("x={}", "[".repeat(200_000))).unwrap()["x"].is_string());
}

#[test]
fn documents_have_a_limited_depth() {
    let nested = |depth: usize| format!("x = {}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(toml_document(&nested(TOML_NESTING)).is_ok());
    let keys = |parts: usize| format!("[data]\ndataset = \"d\"\n{} = 1.5", path(parts));
    assert!(toml_document(&keys(KEY_PARTS)).is_ok());
    // Nested tables, each with the longest key: the deepest document that is accepted.
    let nested_tables = |tables: usize| {
        let key = path(KEY_PARTS);
        format!("{key} = {}1{}", format!("{{ {key} = ").repeat(tables), " }".repeat(tables))
    };
    assert!(toml_document(&nested_tables(TOML_NESTING)).is_ok());
    for (text, place, expected) in [
        (nested(TOML_NESTING + 1), "line 1, column 13", "more than 8 deep"),
        (nested(1_000_000), "line 1", "more than 8 deep"),
        (keys(KEY_PARTS + 1), "line 3, column 16", "more than 8 parts"),
        (format!("[{}]", path(500_000)), "line 1", "more than 8 parts"),
        (nested_tables(TOML_NESTING + 1), "line 1", "more than 8 deep"),
        (format!("x = {}", "{ a = ".repeat(100_000)), "line 1", "more than 8 deep"),
    ] {
        let found = mistakes(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].detail.starts_with(place) && found[0].detail.contains(expected), "{found:?}");
    }
    // Dots and brackets in text and comments do not count.
    let text = format!("# {}\nname = \"{}\" # [[[[[[[[[[\n", path(50), "[a.".repeat(50));
    assert_eq!(toml_document(&text).unwrap()["name"], "[a.".repeat(50));
}

#[test]
fn the_number_of_reported_mistakes_is_limited() {
    let unknown = |count: usize| {
        let mut document = json!({"data": {"dataset": "d"}});
        for i in 0..count {
            document["train"][format!("unknown_{i}")] = json!(1);
        }
        from_json(&document).unwrap_err()
    };
    assert_eq!(unknown(MAX_MISTAKES).len(), MAX_MISTAKES);
    let found = unknown(MAX_MISTAKES + 1);
    assert_eq!(found.len(), MAX_MISTAKES + 1);
    assert!(found[MAX_MISTAKES].detail.contains("1 more unknown key"), "{:?}", found[MAX_MISTAKES]);
    assert_eq!(found[MAX_MISTAKES].pointer, "/train");
    let many = unknown(50_000);
    assert_eq!(many.len(), MAX_MISTAKES + 1);
    // Errors do not repeat a key of half a megabyte.
    let found = from_json(&json!({"data": {"dataset": "d"}, "k".repeat(500_000): 1})).unwrap_err();
    assert!(found.len() == 1 && found[0].detail.len() + found[0].pointer.len() < 1000);
}
