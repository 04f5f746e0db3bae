//! Dependencies: sibling modules never import each other in a cycle, at any depth, and each crate needs only those below it
//! and what its manifest lists. `make map` prints the imports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A module, as the names on the path from its crate's root.
type Module = Vec<String>;
/// What each of some sibling modules imports from the others.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Every module of a crate, with its text.
fn modules(root: &Path) -> BTreeMap<Module, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![(root.to_owned(), Module::new())];
    while let Some((folder, at)) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
            let here: Module = at.iter().cloned().chain([name.clone()]).collect();
            if path.is_dir() {
                folders.push((path, here));
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let module = if matches!(name.as_str(), "mod" | "lib" | "main") { at.clone() } else { here };
                found.insert(module, fs::read_to_string(&path).expect("text"));
            }
        }
    }
    let tests: Vec<Module> = found.iter().flat_map(|(module, text)| tests_of(module, text)).collect();
    found.retain(|module, _| !tests.iter().any(|tests| module.starts_with(tests)));
    found
}

/// The modules in files of their own that a module declares for tests only.
fn tests_of(module: &Module, text: &str) -> Vec<Module> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let declared = lines.windows(2).filter(|two| two[0] == "#[cfg(test)]");
    let name = |two: &[&str]| {
        Some(two[1].trim_start_matches("pub(crate) ").strip_prefix("mod ")?.strip_suffix(';')?.to_owned())
    };
    declared.filter_map(name).map(|name| module.iter().cloned().chain([name]).collect()).collect()
}

/// A module's text without comments and without test-only code.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Every path of the crate in a text, in `use` or anywhere else.
fn paths(text: &str) -> Vec<String> {
    let begins = |word: &str| text.match_indices(word).map(|(at, _)| at).collect::<Vec<_>>();
    let mut found = Vec::new();
    for at in begins("crate::").into_iter().chain(begins("super::")).chain(begins("self::")) {
        let before = text[..at].chars().next_back();
        if before.is_none_or(|before| !(before.is_alphanumeric() || before == '_' || before == ':')) {
            expand("", &text[at..], &mut found);
        }
    }
    found
}

/// Collects the paths of the import tree at the beginning of a text; returns the text after it.
fn expand<'a>(prefix: &str, text: &'a str, found: &mut Vec<String>) -> &'a str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(text.len());
    let (path, mut rest) = (format!("{prefix}{}", &text[..end]), &text[end..]);
    if !(path.ends_with("::") && rest.starts_with('{')) {
        found.push(path);
        return rest;
    }
    rest = rest[1..].trim_start();
    while !rest.is_empty() && !rest.starts_with('}') {
        let before = rest.len();
        rest = expand(&path, rest, found);
        // Skips renamings and commas.
        rest = rest.trim_start_matches(|c: char| c != ',' && c != '}').trim_start_matches(',').trim_start();
        assert!(rest.len() < before, "cannot parse the imports: {text:.80}");
    }
    rest.strip_prefix('}').unwrap_or(rest)
}

/// The module that a path in `from` refers to.
fn target(path: &str, from: &Module, all: &BTreeMap<Module, String>) -> Module {
    let mut names = path.split("::").filter(|name| !name.is_empty()).peekable();
    let mut at = from.clone();
    if names.next_if_eq(&"crate").is_some() {
        at.clear();
    }
    names.next_if_eq(&"self");
    while names.next_if_eq(&"super").is_some() {
        at.pop();
    }
    for name in names {
        let inner: Module = at.iter().cloned().chain([name.to_owned()]).collect();
        if !all.contains_key(&inner) {
            break;
        }
        at = inner;
    }
    at
}

/// What sibling modules import from each other, by their parent module.
fn graphs(all: &BTreeMap<Module, String>) -> BTreeMap<Module, Graph> {
    let mut graphs: BTreeMap<Module, Graph> = BTreeMap::new();
    for (from, text) in all {
        for path in paths(&code(text)) {
            let to = target(&path, from, all);
            let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
            if let (Some(one), Some(other)) = (from.get(shared), to.get(shared)) {
                let graph = graphs.entry(from[..shared].to_vec()).or_default();
                graph.entry(one.clone()).or_default().insert(other.clone());
            }
        }
    }
    graphs
}

/// The names in an order in which each imports only those before it, or else the names that are left in cycles.
fn order(graph: &Graph) -> Result<Vec<String>, BTreeSet<String>> {
    let mut left: BTreeSet<String> = graph.iter().flat_map(|(one, uses)| uses.iter().chain([one])).cloned().collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let free = left.iter().find(|one| graph.get(*one).is_none_or(|uses| uses.is_disjoint(&left))).cloned();
        let Some(free) = free else { return Err(left) };
        left.remove(&free);
        order.push(free);
    }
    Ok(order)
}

/// The crates, each after those that it may use.
const CRATES: [&str; 4] = ["core/src", "engine/src", "analysis/src", "src"];

fn root(of: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(of)
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    for source in CRATES {
        let all = modules(&root(source));
        assert!(all.len() > 30, "{source} was not read");
        for (within, graph) in graphs(&all) {
            let order = order(&graph).unwrap_or_else(|circle| {
                let uses: Vec<_> = circle.iter().map(|one| format!("{one} → {:?}", &graph[one] & &circle)).collect();
                panic!("{source}, {}: an import cycle: {}", within.join("::"), uses.join("; "));
            });
            if within.is_empty() {
                println!("{source}, each module with those that it imports:");
                for one in order {
                    let uses = graph.get(&one).into_iter().flatten().cloned().collect::<Vec<_>>().join(" ");
                    println!("  {one:<10} {uses}");
                }
            }
        }
    }
}

/// The names that a module defines itself.
fn defined(code: &str) -> BTreeSet<String> {
    let kinds = ["struct ", "enum ", "trait ", "type ", "fn ", "const ", "static "];
    let name = |line: &str| {
        let public =
            line.strip_prefix("pub").unwrap_or(line).trim_start_matches("(crate)").trim_start_matches("(super)");
        let rest = public.trim_start().trim_start_matches("async ").trim_start_matches("unsafe ");
        let named = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
        Some(named.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>())
    };
    // Only items of the module itself: what is inside one is indented.
    code.lines().filter(|line| !line.starts_with(' ')).filter_map(name).collect()
}

/// Whether the code of a module uses one of its children, beyond passing its names on.
fn uses(code: &str, child: &str) -> bool {
    let passed_on = |statement: &&str| statement.trim_start().starts_with("pub") && statement.contains("use ");
    let name = format!("{child}::");
    let mut own = code.split(';').filter(|statement| !passed_on(statement));
    own.any(|statement| {
        statement.match_indices(&name).any(|(at, _)| {
            let before = statement[..at].chars().next_back();
            before.is_none_or(|before| !(before.is_alphanumeric() || before == '_' || before == ':'))
        })
    })
}

/// A module with children is a model, which its children use, or a switchboard, which uses them. What both need is in a module
/// of its own.
#[test]
fn a_module_is_used_by_its_children_or_uses_them() {
    let mut both = Vec::new();
    for source in CRATES {
        let all = modules(&root(source));
        for (parent, text) in all.iter().filter(|(parent, _)| !parent.is_empty()) {
            let code = code(text);
            let own = defined(&code);
            let children = all.iter().filter(|(one, _)| one.len() == parent.len() + 1 && one.starts_with(parent));
            let (mut up, mut down) = (false, false);
            for (child, text) in children {
                let name = child.last().expect("a name");
                down |= uses(&code, name);
                up |= paths(&self::code(text)).iter().any(|path| {
                    let last = path.rsplit("::").next().unwrap_or_default();
                    target(path, child, &all) == *parent && own.contains(last)
                });
            }
            if up && down {
                both.push(format!("{source}/{}", parent.join("/")));
            }
        }
    }
    assert!(both.is_empty(), "used by their children and using them: {both:?}");
}

#[test]
fn a_circle_is_seen_however_it_is_written() {
    let of = |texts: &[(&str, &str)]| {
        let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
        let all: BTreeMap<Module, String> =
            texts.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect();
        graphs(&all).values().map(order).any(|order| order.is_err())
    };
    assert!(of(&[("a", "use crate::b::B;"), ("b", "fn f() -> crate::a::A {}")]));
    assert!(of(&[("a", "use crate::{c, b::{\n    B, C as D,\n}};"), ("b", "use super::a;"), ("c", "")]));
    assert!(of(&[("p", ""), ("p::a", "use super::b::B;"), ("p::b", "use crate::p::a::A;")]));
    assert!(!of(&[
        ("a", "use crate::b::B; // crate::a"),
        ("b", "//! crate::a\n#[cfg(test)]\nmod tests { use crate::a; }")
    ]));
}

/// The first sentence of a module's documentation.
fn first_sentence(text: &str) -> Option<String> {
    let lines = text.lines().map_while(|line| line.strip_prefix("//!").map(str::trim));
    let paragraph = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    let end = paragraph.find(". ").map_or(paragraph.len(), |at| at + 1);
    Some(paragraph[..end].replace('|', "\\|")).filter(|sentence| sentence.ends_with('.'))
}

/// `docs/modules.md` is the index of the code. `UPDATE_EXPECT=1 cargo test --test it house::` writes it.
#[test]
fn every_module_is_in_the_index_with_its_first_sentence() {
    let mut index = String::from(
        "# Modules\n\nEach module with the first sentence of its documentation, in the order of their names. A test generates this page. \
         [ARCHITECTURE.md](../ARCHITECTURE.md) is the overview.\n",
    );
    let mut silent = Vec::new();
    for source in CRATES {
        index += &format!("\n## `{source}/`\n\n| module | |\n|---|---|\n");
        for (module, text) in modules(&root(source)).into_iter().filter(|(module, _)| !module.is_empty()) {
            match first_sentence(&text) {
                Some(sentence) => index += &format!("| `{}` | {} |\n", module.join("/"), linkless(&sentence)),
                None => silent.push(format!("{source}/{}", module.join("/"))),
            }
        }
    }
    assert_eq!(silent, [""; 0], "these do not begin with a sentence of documentation");
    expect_test::expect_file!["../../docs/modules.md"].assert_eq(&index);
}

/// A text without rustdoc's links.
fn linkless(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((before, linked)) = rest.split_once("[`") {
        let (name, after) = linked.split_once("`]").expect("a link ends");
        let after = after.strip_prefix('(').map_or(after, |target| target.split_once(')').expect("a target ends").1);
        shown += &format!("{before}`{name}`");
        rest = after;
    }
    shown + rest
}

/// What a crate's manifest lists, and the compiler enforces.
fn needs(crate_: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root(crate_).join("Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = manifest.parse().expect("good TOML");
    manifest["dependencies"].as_table().expect("a table").keys().cloned().collect()
}

#[test]
fn the_core_needs_nothing_that_does_io() {
    assert_eq!(needs("core"), ["arc-swap", "rustix", "serde", "thiserror"]);
}

#[test]
fn crates_need_only_those_below_them_and_no_driver_and_no_server() {
    let ours = |crate_| needs(crate_).into_iter().filter(|name| name.starts_with("highwater")).collect::<Vec<_>>();
    assert_eq!(ours("engine"), ["highwater-core"]);
    assert_eq!(ours("analysis"), ["highwater-core", "highwater-engine"]);
    for (crate_, but) in [("engine", ["axum", "clap", "config"]), ("analysis", ["axum", "tokio", "config"])] {
        let needs = needs(crate_);
        let not = but.into_iter().chain(["nvml-wrapper", "opentelemetry_sdk", "prometheus", "tracing-subscriber"]);
        not.for_each(|name| assert!(!needs.iter().any(|needed| needed == name), "{crate_} needs {name}"));
    }
}

/// Modules with `unsafe` code, and why each needs it. The edge to NVML (`nvml`) is not listed.
const UNSAFE: [(&str, &str, &str); 8] = [
    (
        "core/src",
        "ring::sync",
        "zeroed memory becomes atomics without being written, so that a ring's pages are not resident before use",
    ),
    ("engine/src", "sample::prefetch", "a prefetch instruction has no safe form in the standard library"),
    (
        "engine/src",
        "intake::datagram",
        "senders' credentials: rustix takes process 0, of another namespace, for a valid one",
    ),
    ("engine/src", "intake::seqpacket", "the same of connections"),
    ("engine/src", "recording", "SQLite's count of its memory"),
    ("src", "code_pages", "unmapping pages of a file has no safe form"),
    ("src", "heap", "the allocator, and glibc's calls for it"),
    ("src", "cli", "a handler of a signal, set before there are threads"),
];

#[test]
fn unsafe_code_is_where_it_is_listed() {
    let mut found = BTreeSet::new();
    for source in CRATES {
        for (module, text) in modules(&root(source)) {
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let is_unsafe = |line: &str| !line.trim_start().starts_with("//") && line.contains("unsafe ");
            if module.first().is_none_or(|first| first != "nvml") && code.lines().any(is_unsafe) {
                found.insert((source, module.join("::")));
            }
        }
    }
    assert_eq!(found, UNSAFE.into_iter().map(|(source, module, _)| (source, module.to_owned())).collect());
}

/// The text of an error is made where it is shown, so that callers and tests can match its variants. Only the crate
/// `highwater`, which parses values of settings, may return texts as errors.
#[test]
fn no_library_returns_a_text_as_its_error() {
    for source in ["core/src", "engine/src", "analysis/src"] {
        for (module, text) in modules(&root(source)) {
            assert_eq!(errors_of_text(&code(&text)), Vec::<String>::new(), "{source}, {}", module.join("::"));
        }
    }
}

/// Each `Result<_, String>` in some code, wherever it stands, and each `type Err = String`.
fn errors_of_text(code: &str) -> Vec<String> {
    let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
    let results = code.match_indices("Result<").filter_map(|(at, begin)| {
        let (mut depth, mut last) = (1, 0);
        let rest = code.get(at + begin.len()..)?;
        for (place, byte) in rest.bytes().enumerate() {
            match byte {
                b'<' | b'(' | b'[' => depth += 1,
                // Not the end of an arrow.
                b'>' if rest.as_bytes().get(place.wrapping_sub(1)) == Some(&b'-') => {}
                b'>' | b')' | b']' => depth -= 1,
                b',' if depth == 1 && rest.get(place + 1..)?.trim_start().as_bytes().first() != Some(&b'>') => {
                    last = place + 1
                }
                _ => {}
            }
            if depth == 0 {
                let error = rest.get(..place)?.trim_end().trim_end_matches(',');
                return error.get(last.min(error.len())..)?.trim().eq("String").then_some(error).filter(|_| last > 0);
            }
        }
        None
    });
    let types = code.match_indices("type Err = String").map(|(_, found)| found);
    results.chain(types).map(str::to_owned).collect()
}

#[test]
fn an_error_of_text_is_seen_however_it_is_written() {
    for code in [
        "fn f() -> Result<(), String> {",
        "fn f(&mut self) -> Result<u32, String>;",
        "fn f(\n    a: u8,\n) -> Result<\n    (A, B),\n    String,\n> where",
        "parse: impl Fn(&str) -> Result<Option<T>, String>,",
        "type Err = String;",
    ] {
        assert_eq!(errors_of_text(code).len(), 1, "{code}");
    }
    for code in ["fn f() -> io::Result<String> {", "Result<Vec<(u8, String)>, Error>", "Result<BTreeMap<A, String>, B>"]
    {
        assert_eq!(errors_of_text(code), Vec::<String>::new(), "{code}");
    }
}

/// Cargo.toml turns doctests off, so no example in the documentation would ever be compiled.
#[test]
fn documentation_has_no_example_that_would_not_be_compiled() {
    for source in CRATES {
        for (module, text) in modules(&root(source)) {
            let fences =
                text.lines().filter_map(|line| line.trim().trim_start_matches(['/', '!']).trim().strip_prefix("```"));
            for (number, of) in fences.enumerate() {
                assert!(number % 2 == 1 || of == "text", "{source}, {}: an example of `{of}`", module.join("::"));
            }
        }
    }
}
