//! Converts the documentation's Markdown to HTML: headings with GitHub's anchors, wide tables and code that scroll and
//! have keyboard focus, and no HTML from the source.

use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd};
use std::collections::HashMap;

/// Returns a page's first heading. Empty if the page has no heading.
pub fn title(source: &str) -> String {
    source.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default().trim().to_owned()
}

/// A paragraph, an item of a list or a row of a table, as text without URLs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passage {
    /// The nearest heading above.
    pub heading: String,
    /// The heading's anchor.
    pub anchor: String,
    /// The text. For a row of a table, `first cell: second cell: ...`.
    pub text: String,
    /// Whether the passage is a row of a table that begins with code, such as a key or an option.
    pub is_key: bool,
}

/// Returns the passages of a page, without headings, code blocks and comments.
pub fn passages(source: &str) -> Vec<Passage> {
    let mut all = Vec::new();
    let mut anchors = HashMap::new();
    // The heading and anchor of the passages that follow.
    let mut section = Passage::default();
    let mut text = String::new();
    let (mut is_key, mut in_row) = (false, false);
    // Whether the current text is part of a table's head or of a code block.
    let mut is_left_out = false;
    for event in Parser::new_ext(source, Options::ENABLE_TABLES) {
        match &event {
            Event::Start(Tag::TableHead | Tag::CodeBlock(_)) => is_left_out = true,
            Event::Start(Tag::TableRow) => in_row = true,
            Event::SoftBreak | Event::HardBreak => text.push(' '),
            Event::End(TagEnd::TableCell) => text += ": ",
            Event::End(TagEnd::Heading(_)) => {
                section.heading = std::mem::take(&mut text).trim().to_owned();
                section.anchor = anchor(&section.heading, &mut anchors);
            }
            Event::Start(Tag::List(_))
            | Event::End(
                TagEnd::Paragraph | TagEnd::Item | TagEnd::TableRow | TagEnd::TableHead | TagEnd::CodeBlock,
            ) => {
                let ended = std::mem::take(&mut text);
                let ended = ended.trim().trim_end_matches(':');
                if !is_left_out && !ended.is_empty() {
                    all.push(Passage { text: ended.to_owned(), is_key, ..section.clone() });
                }
                (is_key, in_row, is_left_out) = (false, false, false);
            }
            event => {
                is_key |= in_row && text.is_empty() && matches!(event, Event::Code(_));
                text += plain_text(event).unwrap_or_default();
            }
        }
    }
    all
}

/// Converts the page at `path` to HTML. `is_page` tells whether another path is a page.
pub(super) fn html(source: &str, path: &str, is_page: &dyn Fn(&str) -> bool) -> String {
    let events: Vec<_> = Parser::new_ext(source, Options::ENABLE_TABLES).collect();
    let mut anchors = HashMap::new();
    let mut out = Vec::with_capacity(events.len());
    // For each open link, whether the link has a URL.
    let mut links = Vec::new();
    let mut in_image = false;
    for (index, event) in events.iter().enumerate() {
        match event {
            Event::Start(Tag::Heading { level, .. }) => {
                let text =
                    events[index + 1..].iter().take_while(|e| !matches!(e, Event::End(TagEnd::Heading(_))));
                let text: String = text.filter_map(plain_text).collect();
                let id = Some(anchor(&text, &mut anchors).into());
                let (classes, attrs) = (Vec::new(), Vec::new());
                out.push(Event::Start(Tag::Heading { level: *level, id, classes, attrs }));
            }
            Event::Start(Tag::Table(_)) => {
                // Only elements with keyboard focus can be scrolled by keyboard.
                out.push(Event::Html(
                    r#"<div class="wide" role="group" aria-label="Table" tabindex="0">"#.into(),
                ));
                out.push(event.clone());
            }
            Event::End(TagEnd::Table) => out.extend([event.clone(), Event::Html("</div>\n".into())]),
            Event::Start(Tag::CodeBlock(_)) => out.push(Event::Html(r#"<pre tabindex="0"><code>"#.into())),
            Event::End(TagEnd::CodeBlock) => out.push(Event::Html("</code></pre>\n".into())),
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let url = link_url(dest_url, path, is_page);
                links.push(url.is_some());
                let tag = |dest_url: CowStr<'static>| Tag::Link {
                    link_type: *link_type,
                    dest_url,
                    title: title.clone(),
                    id: id.clone(),
                };
                out.extend(url.map(|url| Event::Start(tag(url.into()))));
            }
            Event::End(TagEnd::Link) => {
                if links.pop() == Some(true) {
                    out.push(event.clone());
                }
            }
            // Pictures are not served, so they are replaced by their descriptions.
            Event::Start(Tag::Image { .. }) => in_image = true,
            Event::End(TagEnd::Image) => in_image = false,
            Event::Text(text) if in_image => out.push(Event::Text(format!("({text})").into())),
            Event::Html(html) | Event::InlineHtml(html) => {
                if !html.trim_start().starts_with("<!--") {
                    out.push(Event::Text(html.clone()));
                }
            }
            other => out.push(other.clone()),
        }
    }
    let mut html = String::new();
    pulldown_cmark::html::push_html(&mut html, out.into_iter());
    html
}

fn plain_text<'a>(event: &'a Event<'_>) -> Option<&'a str> {
    match event {
        Event::Text(text) | Event::Code(text) => Some(text),
        _ => None,
    }
}

/// Returns the anchor of a heading, as on GitHub. A repeated anchor gets a number. `repetitions` counts the repetitions of each anchor.
fn anchor(text: &str, repetitions: &mut HashMap<String, u32>) -> String {
    let characters = text.trim().to_lowercase();
    let characters = characters.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    let name: String = characters.map(|c| if c == ' ' { '-' } else { c }).collect();
    let count = repetitions.entry(name.clone()).and_modify(|n| *n += 1).or_insert(0);
    if *count == 0 { name } else { format!("{name}-{count}") }
}

/// Returns the URL of a link on the page `path`, or `None` if the file is not a page.
fn link_url(link: &str, path: &str, is_page: &dyn Fn(&str) -> bool) -> Option<String> {
    if link.starts_with('#') || link.starts_with("https://") || link.starts_with("http://") {
        return Some(link.to_owned());
    }
    let (file, fragment) =
        link.split_once('#').map_or((link, String::new()), |(file, id)| (file, format!("#{id}")));
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in file.strip_suffix(".md")?.split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    let target = parts.join("/");
    is_page(&target).then(|| format!("/docs/{target}{fragment}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_are_text_without_headings_comments_and_urls() {
        let source = "<!-- Made. -->\n# Title\n\nSee [runs from\nelsewhere](tracking.md), `a_b`.\n\n\
            | key | meaning |\n|---|---|\n| `lr` | a [rate](x.md) |\n\n\
            - one\n- two\n  - three\n\n```\ncode\n```\n";
        let found = passages(source);
        let texts: Vec<_> = found.iter().map(|passage| passage.text.as_str()).collect();
        assert_eq!(texts, ["See runs from elsewhere, a_b.", "lr: a rate", "one", "two", "three"]);
        assert!(found.iter().all(|passage| passage.is_key == passage.text.starts_with("lr")), "{found:?}");
        assert!(found.iter().all(|passage| (&*passage.heading, &*passage.anchor) == ("Title", "title")));
    }

    fn rendered(source: &str, path: &str) -> String {
        html(source, path, &|path| ["team", "reference/rest"].contains(&path))
    }

    #[test]
    fn links_lead_to_pages_or_are_removed() {
        for (link, path, expected) in [
            ("team.md", "other", Some("/docs/team")),
            ("../team.md#tokens", "reference/rest", Some("/docs/team#tokens")),
            ("rest.md", "reference/job-file", Some("/docs/reference/rest")),
            ("reference/rest.md", "team", Some("/docs/reference/rest")),
            ("#here", "team", Some("#here")),
            ("https://example.org/x.md", "team", Some("https://example.org/x.md")),
            ("../README.md", "team", None),
            ("rest.md", "team", None),
            ("javascript:alert(1)", "team", None),
        ] {
            let html = rendered(&format!("[words]({link})"), path);
            match expected {
                Some(to) => assert!(html.contains(&format!("<a href=\"{to}\">words</a>")), "{link}: {html}"),
                None => assert_eq!(html, "<p>words</p>\n", "{link}"),
            }
        }
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        let html = rendered("# A\n## GET /api/v1/jobs/{id}\n## \\[train\\]\n## `code` here\n## A\n", "team");
        for expected in [
            r#"<h1 id="a">"#,
            r#"<h2 id="get-apiv1jobsid">"#,
            r#"<h2 id="train">"#,
            r#"<h2 id="code-here">"#,
            r#"<h2 id="a-1">"#,
        ] {
            assert!(html.contains(expected), "{expected}: {html}");
        }
    }

    #[test]
    fn code_and_tables_can_be_scrolled_by_keyboard_and_html_is_removed() {
        let html = rendered(
            "| a |\n|---|\n| `x < y` |\n\n```sh\na < b\n```\n\n<!-- made -->\n\n<b>bold</b> ![a chart](x.webp)\n",
            "team",
        );
        assert!(html.contains(r#"tabindex="0"><table>"#) && html.contains("<code>x &lt; y</code>"), "{html}");
        assert!(html.contains(r#"<pre tabindex="0"><code>a &lt; b"#), "{html}");
        assert!(!html.contains("made") && !html.contains("<b>") && !html.contains("<img"), "{html}");
        assert!(html.contains("(a chart)"), "{html}");
    }
}
