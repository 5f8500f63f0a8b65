//! Bundles all modules of a page into one file, and all styles into another, so that a browser sends one request instead of thirty. A
//! bundle is made at its first request. Nothing is built beforehand, and each source file is also served.
//!
//! Every module becomes a function that returns the module's exports. Modules must be written in a restricted form:
//! `import { a, b as c } from "./x.js";` on its own line, `export` in front of a declaration, and no cycles.

use std::fmt::Write as _;

/// Bundles the keyboard script and the page's own script with all imported modules; `None` if a file is missing.
pub(crate) fn page(entry: &str, source: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut bundle = Bundle { modules: Vec::new(), text: String::new(), source };
    bundle.add("keys.js", 0)?;
    bundle.add(&format!("{entry}.js"), 0)?;
    Some(bundle.text)
}

/// Bundles `app.css` with the imported files in place of the `@import` lines; `None` if a file is missing.
pub(crate) fn styles(source: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut text = String::new();
    for line in source("app.css")?.lines() {
        match line.strip_prefix("@import \"").and_then(|rest| rest.strip_suffix("\";")) {
            Some(path) => text.push_str(&source(path)?),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    Some(text)
}

struct Bundle<'a, S> {
    /// Paths in the order of `text`. The index of a module is part of its name in `text`.
    modules: Vec<String>,
    text: String,
    source: &'a S,
}

/// Maximum depth of imports. Deeper imports are a cycle.
const MAX_DEPTH: u32 = 20;

impl<S: Fn(&str) -> Option<String>> Bundle<'_, S> {
    /// Adds a module after its imports, and returns its index.
    fn add(&mut self, path: &str, depth: u32) -> Option<usize> {
        if let Some(index) = self.modules.iter().position(|m| m == path) {
            return Some(index);
        }
        if depth > MAX_DEPTH {
            return None;
        }
        let (mut body, mut exports) = (String::new(), Vec::new());
        for line in (self.source)(path)?.lines() {
            if let Some((names, imported)) = parse_import(line) {
                let index = self.add(&resolve(path, imported), depth + 1)?;
                let _ = writeln!(body, "const {{{}}} = m{index};", names.replace(" as ", ": "));
            } else if let Some(declaration) = line.strip_prefix("export ") {
                exports.push(declared_name(declaration)?.to_owned());
                let _ = writeln!(body, "{declaration}");
            } else {
                let _ = writeln!(body, "{line}");
            }
        }
        let (index, exports) = (self.modules.len(), exports.join(", "));
        let _ = write!(
            self.text,
            "// {path}\nconst m{index} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"
        );
        self.modules.push(path.to_owned());
        Some(index)
    }
}

/// Parses `import { names } from "path";` into names and path.
fn parse_import(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("import {")?.strip_suffix("\";")?.split_once("} from \"")
}

/// Returns the name in `const name`, `class name`, `function name` or `async function name`; `None` for a list of names.
fn declared_name(declaration: &str) -> Option<&str> {
    if declaration.starts_with('{') {
        return None;
    }
    let words = declaration.strip_prefix("async ").unwrap_or(declaration);
    let (_, rest) = words.split_once(' ')?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '$').next().filter(|name| !name.is_empty())
}

/// Resolves a relative path such as `../x.js` in the file `importer`.
fn resolve(importer: &str, path: &str) -> String {
    let mut parts: Vec<&str> = importer.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_module_occurs_once_before_modules_that_use_it() {
        let source = |path: &str| {
            Some(match path {
                "keys.js" => "import { one } from \"./a/one.js\";\nexport const keys = one;\n".to_owned(),
                "page.js" => {
                    "import { one as first, two } from \"./a/one.js\";\nexport async function go() {}\n"
                        .into()
                }
                "a/one.js" => {
                    "import { deep } from \"../deep.js\";\nexport function one() {}\nexport class two {}"
                        .into()
                }
                "deep.js" => "export const deep = 1;".into(),
                _ => return None,
            })
        };
        let text = page("page", &source).unwrap();
        assert_eq!(text.matches("// a/one.js\n").count(), 1);
        assert!(text.find("// deep.js").unwrap() < text.find("// a/one.js").unwrap());
        assert!(text.contains("const { one: first, two } = m1;\n") && text.contains("return { one, two };"));
        assert!(text.contains("\nasync function go() {}\nreturn { go };"), "{text}");
        assert!(page("nowhere", &source).is_none());
        let listed = |_: &str| Some("const a = 1;\nexport { a };\n".to_owned());
        assert!(page("page", &listed).is_none(), "export lists are not supported");
    }
}
