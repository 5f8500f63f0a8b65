use super::*;
use crate::http::error::Code;
use lockstep_protocol::stream::Event;

#[derive(Debug, Clone, Serialize, PartialEq, ToSchema)]
struct Item {
    id: String,
    size: Option<f64>,
    lr: f32,
}

const ITEMS: List<Item> = List {
    name: "items",
    sorts: &[("id", |item| item.id.as_str().into()), ("size", |item| item.size.into())],
    default_sort: "id",
    id: |item| &item.id,
    created: None,
};

fn items() -> Vec<Item> {
    let sizes = [Some(2.0), None, Some(1.0), Some(2.0), Some(f64::NAN)];
    sizes.into_iter().enumerate().map(|(n, size)| Item { id: format!("i{n}"), size, lr: 0.1 }).collect()
}

fn all_pages(sort: &str, limit: u32) -> Vec<String> {
    let (mut ids, mut cursor) = (Vec::new(), None);
    loop {
        let params =
            ListParams { sort: Some(sort.into()), limit: Some(limit), cursor, ..ListParams::default() };
        let page = ITEMS.page(None, items(), &params).unwrap();
        assert!(page.elements.items.len() <= limit as usize);
        ids.extend(page.elements.items.into_iter().map(|item| item.id));
        cursor = page.next_cursor;
        if cursor.is_none() {
            return ids;
        }
    }
}

#[test]
fn pages_of_any_size_are_the_whole_list_in_order() {
    for limit in 1..=6 {
        assert_eq!(all_pages("id", limit), ["i0", "i1", "i2", "i3", "i4"]);
        assert_eq!(all_pages("-id", limit), ["i4", "i3", "i2", "i1", "i0"]);
        assert_eq!(all_pages("size", limit), ["i2", "i0", "i3", "i1", "i4"]);
        assert_eq!(all_pages("-size", limit), ["i3", "i0", "i2", "i4", "i1"]);
    }
}

#[test]
fn a_cursor_with_a_nul_character_is_refused() {
    let cursor = Pages::new("items", "id").encode(&(Key::Text("a\0".into()), "a")).unwrap();
    let page = ITEMS.page(None, items(), &ListParams { cursor: Some(cursor), ..ListParams::default() });
    let Err(Error::WithCode(Code::WrongCursor, detail)) = page else { panic!("it is refused") };
    assert!(detail.contains("not valid for this list"), "{detail}");
}

#[test]
fn elements_have_only_the_requested_fields() {
    let params =
        ListParams { fields: Some("lr".into()), limit: Some(1), count: Some(true), ..Default::default() };
    let page = ITEMS.page(None, items(), &params).unwrap();
    assert_eq!(serde_json::to_string(&page.elements).unwrap(), r#"[{"lr":0.1}]"#);
    assert_eq!((page.next_cursor.is_some(), page.total), (true, Some(5)));
}

#[test]
fn fields_of_flattened_structs_can_be_requested() {
    // An event has all fields of its body, and the body of a rank's event has all fields of the rank's report.
    let fields = Fields::parse::<Event>(Some("seq,type,images_per_second")).unwrap().unwrap();
    assert!(fields.has("seq") && fields.has("type") && fields.has("images_per_second"));
}
