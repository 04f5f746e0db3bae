//! YAML that costs more than its text: aliases, each of which is a copy of what it names, and nesting that is gone into by
//! recursion. Looked for in the parser's events, which take no more room than the text.

use yaml_rust2::Event;
use yaml_rust2::parser::Parser;

/// Settings are nested twice.
const MOST_DEPTH: usize = 16;

/// What no settings file needs, with its line from 1. A text that is no YAML is refused by whoever reads it.
pub(super) fn refusal(text: &str) -> Option<(usize, String)> {
    let mut parser = Parser::new_from_str(text);
    let mut depth = 0_usize;
    while let Ok((event, mark)) = parser.next_token() {
        match event {
            Event::StreamEnd => return None,
            Event::Alias(_) => {
                let problem =
                    "aliases (`*name`) are not taken, since a few can stand for any amount of text; write it out";
                return Some((mark.line(), problem.to_owned()));
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MOST_DEPTH {
            return Some((mark.line(), format!("is nested more than {MOST_DEPTH} times")));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_and_deep_nesting_are_found_with_their_lines() {
        assert_eq!(refusal("a: &x 1\nb: '*x'\nc: |\n  *x\n# *x\n"), None, "an anchor alone copies nothing");
        assert_eq!(refusal("a: &x 1\n\nb: [1, *x]\n").expect("an alias").0, 3);
        assert_eq!(refusal(": : [}"), None, "for the parser to refuse");
        for text in ["- ".repeat(100_000), "[".repeat(100), "{a: ".repeat(100), "? ".repeat(100_000)] {
            let refused = refusal(&text);
            assert!(refused.as_ref().is_some_and(|(line, why)| *line == 1 && why.contains("nested")), "{refused:?}");
        }
    }
}
